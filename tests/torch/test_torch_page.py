"""docs/torch.md is true: its scripts run one after the other, and print what the page says.

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

PAGE = DOCS / "torch.md"
_SCRIPT = re.compile(r"(?ms)^```python\n(# (torchrun .*? )?(\w+\.py)\n.*?)^```(?:\n\n```\n(.*?)^```$)?")


def test_the_scripts_print_what_the_page_says(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    scripts = [match.groups() for match in _SCRIPT.finditer(text)]
    assert len(scripts) == text.count("```python") == 8
    for code, launched, name, said in scripts:
        (tmp_path / name).write_text(code, "utf-8")
        found = run(tmp_path, name, launched)
        if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS") and said is not None:
            text = text.replace(f"{code}```\n\n```\n{said}```", f"{code}```\n\n```\n{found}```")
        else:
            assert (name, found) == (name, said or "")
    if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS"):
        PAGE.write_text(text, "utf-8")


def run(folder: Path, name: str, launched: str | None) -> str:
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
