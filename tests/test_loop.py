"""docs/loop.py: whoever is killed, and whenever, each prompt is trained once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOOP = ROOT / "docs/loop.py"
NAMES = ("trainer", "worker 1", "worker 2")


class Run:
    """The processes of the loop, by name, in a folder of their own."""

    def __init__(self, url: str, folder: Path) -> None:
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "REPLAYBUF_URL": url}
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        with (self._folder / f"{name}.out").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(LOOP), name.split()[0]],
                cwd=self._folder,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def step(self) -> int:
        try:
            return int(json.loads((self._folder / "loop-weights.json").read_text())["step"])
        except FileNotFoundError:
            return 0

    def wait_for(self, step: int) -> None:
        while self.step() < step and self.processes["trainer"].poll() is None:
            time.sleep(0.01)

    def printed(self) -> str:
        return "".join((self._folder / f"{name}.out").read_text() for name in NAMES)


def test_a_run_that_is_killed_trains_on_every_prompt_once(shared_url: str, tmp_path: Path) -> None:
    run, chance = Run(shared_url, tmp_path), random.Random(1)
    try:
        for name in NAMES:
            run.start(name)
        for step, name in zip(range(3, 23, 3), [*NAMES, *NAMES], strict=False):
            run.wait_for(step)
            time.sleep(chance.uniform(0, 0.05))
            run.kill(name)
            run.start(name)
        for process in run.processes.values():
            assert process.wait(90) == 0, run.printed()
    finally:
        for name in run.processes:
            run.kill(name)
    trained = json.loads((tmp_path / "loop-weights.json").read_text())["trained"]
    assert sorted(trained) == list(range(200))
    assert run.printed().count("trainer: goes on from step") == 2
    assert "was restored to the checkpoint of step" in run.printed()
    assert "25 steps, 200 of 200 prompts trained" in run.printed()
    assert "Traceback" not in run.printed()
