"""Fixtures of the torch tier: a buffer with groups, and ranks in processes of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig

ROOT = Path(__file__).resolve().parents[2]

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture
def config(tmp_path: Path) -> ReplayBufferConfig:
    return ReplayBufferConfig(url=f"sqlite:///{tmp_path}/buffer.db", policy="fifo")


@pytest.fixture
def shared_config(shared_url: str) -> ReplayBufferConfig:
    return ReplayBufferConfig(url=shared_url, policy="fifo")


class Ranks:
    """Starts ranks of `tests.torch.roles`, which find each other by a file, and ends those that are left."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self._jobs = 0
        self._running: list[subprocess.Popen[str]] = []

    def start(self, role: str, *arguments: object, size: int = 2) -> list[subprocess.Popen[str]]:
        """Start a job: all its ranks with the same role."""
        self._jobs += 1
        meeting = self._folder / f"meeting-{self._jobs}"
        started = [self._start(role, meeting, rank, size, *arguments) for rank in range(size)]
        self._running += started
        return started

    def _start(self, role: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.torch.roles", role, self._url, str(self._folder), *map(str, arguments)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @staticmethod
    def end(rank: subprocess.Popen[str], code: int | None = 0) -> tuple[str, str]:
        """Wait for a rank and return what it printed."""
        out, err = rank.communicate(timeout=240)
        assert code is None or rank.returncode == code, err
        return out, err

    def close(self) -> None:
        for rank in self._running:
            rank.kill()
            rank.communicate()


@pytest.fixture
def ranks(shared_url: str, tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path, shared_url)
    yield started
    started.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.torch)
