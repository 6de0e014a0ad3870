"""The scripts of docs/examples/torch run one after the other, and print what they say."""

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
from tests.integrations.scripts import RANKS, ROOT, files_of, output_of, printed_by
from tests.torch.test_collate import DTYPES


def test_the_scripts_print_what_they_say(tmp_path: Path) -> None:
    scripts = files_of("torch")
    for name, code in scripts.items():
        (tmp_path / name).write_text(code, "utf-8")
    for name, launched in {"fill.py": [], "train.py": [], "ddp.py": RANKS}.items():
        assert (name, run(tmp_path, name, *launched)) == (name, output_of(scripts[name]))


def run(folder: Path, name: str, *launched: str) -> str:
    return printed_by([*launched, name], folder, {"PYTHONPATH": f"{ROOT}:{folder}"})


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment, text=True, **pipes)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_the_loop_goes_on_with_the_same_data_after_every_kill(tmp_path: Path, kills: int) -> None:
    """`kill -9` at any moment of a step: the lines that it prints, and the weights, are those of a run without."""
    scripts = files_of("torch")
    steps = 10 * (kills + 1)
    folders = [tmp_path / "killed", tmp_path / "whole"]
    for folder in folders:
        folder.mkdir()
        (folder / "fill.py").write_text(scripts["fill.py"].replace("range(80)", f"range({4 * steps + 8})"), "utf-8")
        (folder / "train.py").write_text(scripts["train.py"].replace('"weights.pt", 6', f'"weights.pt", {steps}'))
        run(folder, "fill.py")
    killed_folder, whole_folder = folders
    expected = run(whole_folder, "train.py").splitlines()
    assert len(expected) == steps
    chance, printed = random.Random(), set[str]()
    for _ in range(kills):
        with started(killed_folder, "train.py") as process:
            assert process.stdout is not None
            line_count = 0
            while line_count < 2 and (line := process.stdout.readline().rstrip()):
                line_count += not line.startswith("goes on")
                printed.add(line)
            assert line_count == 2, process.communicate()
            time.sleep(chance.random() * 0.05)
            process.kill()
            printed |= {*process.communicate()[0].splitlines()}
    last_lines = run(killed_folder, "train.py").splitlines()
    assert re.fullmatch(r"goes on after step \d+", last_lines[0])
    printed |= {*last_lines}
    assert {line for line in printed if not line.startswith("goes on")} <= {*expected}
    weights = [torch.load(folder / "weights.pt", weights_only=True) for folder in folders]
    assert weights[0]["step"] == weights[1]["step"] == steps
    for name, tensor in weights[0]["model"].items():
        assert torch.equal(tensor, weights[1]["model"][name]), name


def test_the_table_of_tensors_is_complete() -> None:
    for cls in (Pad, Pack):
        documented = set(re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^    \| (`.*?) \|", cls.__doc__ or ""))))
        columns = {*DTYPES, "uids"}
        assert documented == (columns if cls is Pad else columns - {"attention_mask"} | {"cu_seqlens", "max_seqlen"})
