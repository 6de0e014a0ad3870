"""docs/torch.md is true: its scripts run one after the other, and print what the page says.

With REPLAYBUF_TEST_UPDATE_DOCS=1 the outputs are written anew.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from replaybuf.integrations.torch import Pack, Pad
from tests.integrations.scripts import files_of, output_of
from tests.pages import DOCS
from tests.torch.conftest import ROOT
from tests.torch.test_collate import DTYPES

PAGE = DOCS / "torch.md"
_SCRIPT = re.compile(r"(?ms)^```python\n(# (\w+\.py)\n.*?)^```(?:\n\n```\n(.*?)^```$)?")


def test_the_scripts_print_what_the_page_says(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    found = _SCRIPT.findall(text)
    assert len(found) == text.count("```python") == 2
    for code, name, said in found:
        (tmp_path / name).write_text(code, "utf-8")
        printed = run(tmp_path, name)
        if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS") and said:
            text = text.replace(f"{code}```\n\n```\n{said}```", f"{code}```\n\n```\n{printed}```")
            PAGE.write_text(text, "utf-8")
        else:
            assert (name, printed) == (name, said)
    for name, code in files_of("torch").items():
        (tmp_path / name).write_text(code, "utf-8")
        assert run(tmp_path, name, "--nproc-per-node=2") == output_of(code)


def run(folder: Path, name: str, *launched: str) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", *launched] if launched else []
    with started(folder, *launcher, name) as process:
        printed, problems = process.communicate(timeout=300)
    assert process.returncode == 0, problems
    return printed


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment, text=True, **pipes)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_the_loop_goes_on_with_the_same_data_after_every_kill(tmp_path: Path, kills: int) -> None:
    """`kill -9` at any moment of a step: the lines that it prints, and the weights, are those of a run without."""
    scripts = {name: code for code, name, _ in _SCRIPT.findall(PAGE.read_text("utf-8"))}
    steps = 10 * (kills + 1)
    folders = [tmp_path / "killed", tmp_path / "whole"]
    for folder in folders:
        folder.mkdir()
        (folder / "fill.py").write_text(scripts["fill.py"].replace("range(80)", f"range({4 * steps + 8})"), "utf-8")
        (folder / "train.py").write_text(scripts["train.py"].replace('"weights.pt", 6', f'"weights.pt", {steps}'))
        run(folder, "fill.py")
    killed, whole = folders
    expected = run(whole, "train.py").splitlines()
    assert len(expected) == steps
    chance, seen = random.Random(), set[str]()
    for _ in range(kills):
        with started(killed, "train.py") as process:
            assert process.stdout is not None
            begun = 0
            while begun < 2 and (line := process.stdout.readline().rstrip()):
                begun += not line.startswith("goes on")
                seen.add(line)
            assert begun == 2, process.communicate()
            time.sleep(chance.random() * 0.05)
            process.kill()
            seen |= {*process.communicate()[0].splitlines()}
    rest = run(killed, "train.py").splitlines()
    assert re.fullmatch(r"goes on after step \d+", rest[0])
    seen |= {*rest}
    assert {line for line in seen if not line.startswith("goes on")} <= {*expected}
    weights = [torch.load(folder / "weights.pt", weights_only=True) for folder in folders]
    assert weights[0]["step"] == weights[1]["step"] == steps
    for name, tensor in weights[0]["model"].items():
        assert torch.equal(tensor, weights[1]["model"][name]), name


def test_the_table_of_tensors_is_complete() -> None:
    for cls in (Pad, Pack):
        documented = set(re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^    \| (`.*?) \|", cls.__doc__ or ""))))
        both = {*DTYPES, "uids"}
        assert documented == (both if cls is Pad else both - {"attention_mask"} | {"cu_seqlens", "max_seqlen"})
