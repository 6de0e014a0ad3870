"""docs/frameworks/trl.md: TRL's own trainers, with rollouts from a buffer."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.scripts import MATH, ROOT, files_of, lines_of, start, until, write

pytestmark = pytest.mark.frameworks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("trl")
    subprocess.run([sys.executable, "-m", "tests.integrations.tiny_model", tmp_path / "model"], cwd=ROOT, check=True)
    shutil.copy(MATH, tmp_path / "math.jsonl")
    write("trl.md", tmp_path)
    return tmp_path


def trained(log: Path) -> dict[int, list[int]]:
    """Return the prompts of each step; of a step that was made again, since its weights were lost, the last ones."""
    lines = re.findall(r"step (\d+) trains prompts (\[.*?\])", log.read_text())
    return {int(step): json.loads(prompts) for step, prompts in lines}


def test_a_trainer_that_is_killed_goes_on_and_every_prompt_is_trained_once(folder: Path) -> None:
    log, generator = folder / "train.py.log", start("generate.py", folder)
    try:
        trainer = start("train.py", folder)
        until(lambda: "step 6 trains" in log.read_text(), "the trainer was in step 6", trainer, generator)
        trainer.kill()
        assert trainer.wait() == -signal.SIGKILL
        killed = log.read_text()
        trainer = start("train.py", folder)
        assert trainer.wait(timeout=240) == 0, log.read_text()
        assert generator.poll() is None
    finally:
        generator.kill()
        generator.wait()
    assert "step 5 trains" in killed
    again = log.read_text()[len(killed) :]
    assert re.findall(r"step (\d+) trains", again)[0] in ("3", "5")  # after the last step that was saved whole
    steps = trained(log)
    assert sorted(steps) == list(range(1, 11))
    assert sorted(number for prompts in steps.values() for number in prompts) == list(range(40))
    losses = [float(loss) for loss in re.findall(r"'grad_norm': '?([-\d.e]+)", log.read_text())]
    assert any(losses)


def test_the_lines_of_the_user_are_few() -> None:
    assert lines_of(files_of("trl.md")["rollouts.py"]) <= 30
