"""The change that docs/reverb.md documents, applied to open-instruct as it is in a checkout.

`REPLAYBUF_OPEN_INSTRUCT` names a checkout of https://github.com/allenai/open-instruct at the commit of the page.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import Page

pytestmark = pytest.mark.frameworks

PROJECT = Path(__file__).resolve().parents[2]


def documented_change() -> str:
    return Page("reverb.md").text.split("```diff\n")[2].split("```")[0]


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A copy of the checkout's package, with the change."""
    folder = os.environ.get("REPLAYBUF_OPEN_INSTRUCT")
    if not folder:
        pytest.skip("REPLAYBUF_OPEN_INSTRUCT names no checkout of open-instruct")
    copied = tmp_path / "open-instruct"
    shutil.copytree(Path(folder) / "open_instruct", copied / "open_instruct")
    apply = ["git", "apply", "--unsafe-paths", "--verbose", "-"]
    done = subprocess.run(apply, cwd=copied, input=documented_change(), text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return copied


def test_its_actor_keeps_its_results_in_the_database_and_goes_on_with_them(changed: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(changed), str(PROJECT)])}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("their_actor.py")), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "table": "replaybuf.integrations.reverb.open_instruct",
        "equal": True,
        "after_shutdown": [None, 4, True],
        "resumed": [0, 1, 2, 3],
        "left": 2,
    }
    assert (tmp_path / "replay.db").is_file()
