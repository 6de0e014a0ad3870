"""The rollout workers as processes: starting, watching, restarting and ending them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from replaybuf.demo.folder import RunFolder
from replaybuf.demo.settings import WorkerSettings
from replaybuf.errors import ReplayBufError

_COMMAND = (sys.executable, "-m", "replaybuf.demo.worker")
_PATIENCE_SECONDS = 3.0  # for a worker to end by itself
_FAILURES = 3  # in a row, each within these seconds of its start, and the run ends
_EARLY_SECONDS = 10.0


class WorkerProcesses:
    """The processes of the workers; leaving the `with` block ends them."""

    def __init__(self, folder: RunFolder, settings: Sequence[WorkerSettings]) -> None:
        self._folder = folder
        self._all = [_WorkerProcess(folder, one) for one in settings]

    def __enter__(self) -> WorkerProcesses:
        for process in self._all:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """The process ids, by worker."""
        return [process.pid for process in self._all]

    @property
    def log(self) -> Path:
        """The log of the first worker."""
        return self._folder.log(0)

    def restart_dead(self) -> list[str]:
        """Restart workers that ended. Return a line about each. Raises ReplayBufError if one keeps failing."""
        return [line for process in self._all if (line := process.restart_if_dead())]

    def stop(self) -> None:
        """End all workers: by the end of their input, or by force if that takes too long."""
        for process in self._all:
            process.close_input()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for process in self._all:
            process.end(deadline)


class _WorkerProcess:
    def __init__(self, folder: RunFolder, settings: WorkerSettings) -> None:
        self._folder, self._settings = folder, settings
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._failures = 0

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; its output goes to the worker's log. Ctrl-C in the terminal doesn't reach it."""
        with open(self._folder.log(self._settings.worker), "wb") as log:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started = time.monotonic()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already; the next look notices
            self._process.stdin.write(self._settings.to_json().encode() + b"\n")
            self._process.stdin.flush()

    def restart_if_dead(self) -> str | None:
        """Restart the process if it ended, and return a line about that."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return None
        name, pid = f"worker {self._settings.worker}", self.pid
        reason = f"was killed ({_signal_name(-code)})" if code < 0 else f"failed: {self._last_words()}"
        if code >= 0:
            early = time.monotonic() - self._started < _EARLY_SECONDS
            self._failures = self._failures + 1 if early else 1
            if self._failures >= _FAILURES:
                log = self._folder.log(self._settings.worker)
                raise ReplayBufError(f"{name} {reason} ({_FAILURES} times in a row; all that it wrote is in {log})")
        self.close_input()
        self.start()
        return f"{name} (pid {pid}) {reason}; started again as pid {self.pid}"

    def _last_words(self) -> str:
        lines = self._folder.log(self._settings.worker).read_text("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")

    def close_input(self) -> None:
        """Tell the process to end."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def end(self, deadline: float) -> None:
        """Wait for the end of the process, and kill it at the deadline."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
