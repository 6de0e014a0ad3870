"""The demo as people run it: processes in a folder of their own."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import replaybuf
from replaybuf.cli.demo.worker import BATCH_GROUPS, Run, RunFolder
from tests.scripts import Program

ROOT = Path(replaybuf.__file__).parents[1]
_PATIENCE = 240  # seconds, after which a run that hangs is ended


class Demo:
    """One process of the demo; leaving the block kills it."""

    def __init__(self, folder: Path, url: str, *options: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REPLAYBUF_")}
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        command = ["-m", "replaybuf", "demo"]
        self.folder = folder
        self.process = Program(*command, "--url", url, *options, cwd=folder, env=environment)
        self.output = self.process.stdout
        self.lines: list[str] = []
        self._limit = threading.Timer(_PATIENCE, self.process.kill)
        self._limit.start()

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        self.kill()
        self.output.close()

    def kill(self) -> None:
        """kill -9 of the trainer's process."""
        self.process.kill()
        self.process.wait()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line with this pattern, of those not read yet."""
        for line in self.output:
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        pytest.fail(f"no line with {pattern!r} in: {''.join(self.lines)}")

    def wait_for_step(self, step: int) -> None:
        """Until the weights of this step are saved."""
        wait_until(lambda: self.process.poll() is not None or saved_step(self.folder) >= step, _PATIENCE)

    def end(self) -> tuple[str, int]:
        """All output, and the exit code."""
        self.lines += self.output
        return "".join(self.lines), self.process.wait(timeout=20)

    def worker_pids(self) -> list[int]:
        return [int(pid) for pid in self.wait_for(r"Rollout workers: pid ([\d, ]+)")[1].split(", ")]


def run_demo(folder: Path, url: str, *options: str) -> tuple[str, int]:
    """Output and exit code of a whole run."""
    with Demo(folder, url, *options) as demo:
        return demo.end()


def saved_step(folder: Path) -> int:
    """The step of the weights that are there; -1 without any."""
    saved = next((RunFolder(path).load() for path in folder.glob("*.run")), None)
    return -1 if saved is None else saved.step


def assert_trained_once(folder: Path, steps: int, output: str) -> Run:
    """Each prompt of so many steps was trained, and none twice, by the record and by what was said."""
    [path] = folder.glob("*.run")
    saved = RunFolder(path).load()
    assert saved is not None
    assert saved.step == steps
    assert sorted(saved.trained) == list(range(steps * BATCH_GROUPS))
    assert f"Each of the {steps * BATCH_GROUPS:,} prompts was trained once." in output
    assert "Traceback" not in output
    return saved


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)
