"""docs/torch.md and torch-ranks.md are true: their scripts run one after the other, and print what the pages say.

With REPLAYBUF_TEST_UPDATE_DOCS=1 the outputs are written anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from replaybuf.torch import Pack, Pad
from tests.pages import DOCS
from tests.torch.conftest import ROOT
from tests.torch.test_collate import DTYPES

PAGE, RANKS = DOCS / "torch.md", DOCS / "torch-ranks.md"
_SCRIPT = re.compile(r"(?ms)^```python\n(# (torchrun .*? )?(\w+\.py)\n.*?)^```(?:\n\n```\n(.*?)^```$)?")


def test_the_scripts_print_what_the_pages_say(tmp_path: Path) -> None:
    for page, scripts in ((PAGE, 4), (RANKS, 3)):
        text = page.read_text("utf-8")
        found = _SCRIPT.findall(text)
        assert len(found) == text.count("```python") == scripts
        for code, launched, name, said in found:
            (tmp_path / name).write_text(code, "utf-8")
            printed = run(tmp_path, name, launched)
            if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS") and said:
                text = text.replace(f"{code}```\n\n```\n{said}```", f"{code}```\n\n```\n{printed}```")
                page.write_text(text, "utf-8")
            else:
                assert (name, printed) == (name, said)


def run(folder: Path, name: str, launched: str) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", *launched.split()[1:]] if launched else []
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, name]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_table_of_tensors_is_complete() -> None:
    for cls in (Pad, Pack):
        documented = set(re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^    \| (`.*?) \|", cls.__doc__ or ""))))
        both = {*DTYPES, "uids"}
        assert documented == (both if cls is Pad else both - {"attention_mask"} | {"cu_seqlens", "max_seqlen"})
        assert all(f"`{name}`" in PAGE.read_text("utf-8") for name in documented)
