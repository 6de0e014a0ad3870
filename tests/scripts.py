"""Scripts of tests that run in a process of their own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).parents[1]
BEGINNING = """
import asyncio, gc, multiprocessing, os, pickle, sys, threading, time
from replaybuf import *
from replaybuf.errors import *
from tests.scripts import forked
from tests.stores import *
url = sys.argv[1] if sys.argv[1:] else ""
"""
_one_at_a_time = threading.Lock()


def forked(work: Callable[[], object], leave: Callable[[], object] = lambda: os._exit(0)) -> int:
    """Fork a process that does some work and leaves, with the exit code 1 if that failed; return its pid."""
    if (pid := os.fork()) == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        leave()
    return pid


class _Fork:
    """A fork of `tests.zygote` that runs a text, with these files as its standard input, output and error.

    With `modules`, it is of a zygote that has imported them, and warnings are ignored.
    """

    def __init__(
        self,
        text: str,
        arguments: Sequence[object],
        files: Sequence[int],
        environment: Mapping[str, str] = os.environ,
        folder: str = "",
        modules: tuple[str, ...] = (),
    ) -> None:
        request = {"text": text, "arguments": [*map(str, arguments)], "environment": dict(environment)}
        request["folder"] = folder or os.getcwd()
        reading_end, ending = os.pipe()
        with _one_at_a_time:
            socket.send_fds(_zygote(*modules), [json.dumps(request).encode()], [*files, ending])
        os.close(ending)
        self._told = os.fdopen(reading_end, "rb", buffering=0)
        self._text = b""
        while b"\n" not in self._text:
            if not (received := self._told.read(100)):
                raise RuntimeError("the process that forks has ended; its own output says why")
            self._text += received
        pid, _, self._text = self._text.partition(b"\n")
        self.pid = int(pid)
        self.returncode: int | None = None

    def poll(self, seconds: float | None = 0) -> int | None:
        """Wait for the exit code, for so long, or for ever."""
        while self.returncode is None:
            if self._text.endswith(b"\n"):
                self.returncode = int(self._text)
                self._told.close()
            elif not select.select([self._told], [], [], seconds)[0]:
                break
            else:
                self._text += self._told.read(100)
        return self.returncode

    def send_signal(self, sent: int) -> None:
        if self.poll() is None:  # else the number may be another process's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sent)

    @contextlib.contextmanager
    def _killed_after(self, seconds: float) -> Iterator[None]:
        expired = threading.Timer(seconds, self.send_signal, [signal.SIGKILL])
        expired.start()
        try:
            yield
        finally:
            expired.cancel()


class Script(_Fork):
    """A script that runs in a fork of the zygote: its standard output is here, line by line.

    Its standard input is empty, and is open until its end is waited for.
    """

    def __init__(self, text: str, *arguments: object) -> None:
        (reading, writing), (input_end, self._input) = os.pipe(), os.pipe()
        self.stdout = os.fdopen(reading)
        self._problems = tempfile.TemporaryFile("w+")  # noqa: SIM115
        super().__init__(BEGINNING + textwrap.dedent(text), arguments, (input_end, writing, self._problems.fileno()))
        for end in (input_end, writing):
            os.close(end)
        self._end: tuple[int, str, str] | None = None

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._end is None:
            self.send_signal(signal.SIGKILL)
            self.end()

    def end(self, seconds: float = 40) -> tuple[int, str, str]:
        """Wait for the end: the exit code, and what was written since to standard output, and in all to stderr."""
        if self._end is None:
            os.close(self._input)
            with self._killed_after(seconds), self.stdout, self._problems:
                output = self.stdout.read()
                code = self.poll(None)
                assert code is not None
                self._problems.seek(0)
                self._end = code, output, self._problems.read()
        return self._end


_PROGRAM = """
import os, runpy, sys
del sys.argv[0]
sys.stdout.reconfigure(line_buffering=bool(os.environ.get("PYTHONUNBUFFERED")))
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Program(_Fork):
    """`python -W error COMMAND`, of a file or `-m` and a module, in a fork of the zygote.

    It has the calls of a `Popen` whose stderr goes where stdout goes: to a file, or into a pipe of text.
    """

    def __init__(
        self,
        *command: str,
        cwd: Path,
        env: Mapping[str, str] = os.environ,
        stdout: IO[bytes] | None = None,
        modules: tuple[str, ...] = (),
    ) -> None:
        self._command = command
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading)  # empty, if the output goes to a file
        output = writing if stdout is None else stdout.fileno()
        with open(os.devnull) as nothing:
            super().__init__(_PROGRAM, command, (nothing.fileno(), output, output), env, str(cwd), modules)
        os.close(writing)
        if stdout is not None:
            self.stdout.close()

    def wait(self, timeout: float | None = None) -> int:
        if (code := self.poll(timeout)) is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 90) -> tuple[str, None]:
        """All output that is left, once the program has ended. One that doesn't is killed, and fails the test."""
        with self._killed_after(timeout):
            printed = self.stdout.read()
            self.wait()
        return printed, None

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait()


@functools.cache
def _zygote(*modules: str) -> socket.socket:
    own_end, child_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
    own_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with child_end:
        warnings = "ignore" if modules else "error"
        command = [sys.executable, "-W", warnings, "-m", "tests.zygote", str(child_end.fileno()), *modules]
        environment = {"OMP_NUM_THREADS": "1", **os.environ} if modules else None  # torch reads it when it is imported
        process: Any = subprocess.Popen(command, cwd=_ROOT, pass_fds=[child_end.fileno()], env=environment)
    atexit.register(lambda: (own_end.close(), process.wait(10)))
    return own_end


def run(script: str, *arguments: object, expect: int = 0, send: signal.Signals | None = None) -> str:
    """Run a script in which every warning is an error; it has to end by itself, without a word on stderr."""
    process = Script(script, *arguments)
    if send is not None:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(send)
    code, output, problems = process.end()
    assert problems == "" or send is not None, problems
    assert code == expect, problems
    return output + (problems if send is not None else "")
