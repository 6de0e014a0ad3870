"""Scripts of tests that run in a process of their own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


class Script:
    """A script that runs in a fork of `tests.zygote`: its standard output is here, line by line.

    Its standard input is empty, and is open until its end is waited for.
    """

    def __init__(self, text: str, *arguments: object) -> None:
        (reading, writing), (input_end, self._input), (ended, ending) = os.pipe(), os.pipe(), os.pipe()
        self.stdout = os.fdopen(reading)
        self._ended = os.fdopen(ended)
        self._problems = tempfile.TemporaryFile("w+")  # noqa: SIM115
        request = {
            "text": BEGINNING + textwrap.dedent(text),
            "arguments": [*map(str, arguments)],
            "environment": dict(os.environ),
            "folder": os.getcwd(),
        }
        with _one_at_a_time:
            files = [input_end, writing, self._problems.fileno(), ending]
            socket.send_fds(_zygote(), [json.dumps(request).encode()], files)
        for end in (input_end, writing, ending):
            os.close(end)
        self.pid = int(self._ended.readline())
        self._end: tuple[int, str, str] | None = None

    def send_signal(self, sent: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, sent)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._end is None:
            self.send_signal(signal.SIGKILL)
            self.end()

    def end(self, seconds: float = 40) -> tuple[int, str, str]:
        """Wait for the end: the exit code, and what was written since to standard output, and in all to stderr."""
        if self._end is None:
            self._end = self._wait(seconds)
        return self._end

    def _wait(self, seconds: float) -> tuple[int, str, str]:
        os.close(self._input)
        expired = threading.Timer(seconds, self.send_signal, [signal.SIGKILL])
        expired.start()
        try:
            with self.stdout, self._ended, self._problems:
                out = self.stdout.read()
                code = int(self._ended.readline())
                self._problems.seek(0)
                problems = self._problems.read()
        finally:
            expired.cancel()
        return code, out, problems


@functools.cache
def _zygote() -> socket.socket:
    ours, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with its:
        command = [sys.executable, "-W", "error", "-m", "tests.zygote", str(its.fileno())]
        process: Any = subprocess.Popen(command, cwd=_ROOT, pass_fds=[its.fileno()])
    atexit.register(lambda: (ours.close(), process.wait(10)))
    return ours


def run(script: str, *arguments: object, expect: int = 0, send: signal.Signals | None = None) -> str:
    """Run a script in which every warning is an error; it has to end by itself, without a word on stderr."""
    process = Script(script, *arguments)
    if send is not None:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(send)
    code, out, problems = process.end()
    assert problems == "" or send is not None, problems
    assert code == expect, problems
    return out + (problems if send is not None else "")
