"""What needs torch says so where it isn't installed, and nothing else loads it."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_torch_room_names_the_package() -> None:
    said = run(
        "import sys\nsys.modules['torch'] = None\nimport replaybuf\nfrom replaybuf.errors import MissingDriverError\n"
        "try: import replaybuf.torch\nexcept MissingDriverError as error: print(isinstance(error, ImportError), error)"
    )
    assert said == "True replaybuf.torch needs torch, which is not installed: pip install torch\n"


def test_sharing_out_by_length_needs_no_torch() -> None:
    sharing = (
        "from replaybuf.rules.balance import balance\nprint(sorted(balance([3, 2, 1], 2)), 'torch' in sys.modules)"
    )
    assert run(f"import sys\n{sharing}") == "[[0], [1, 2]] False\n"
