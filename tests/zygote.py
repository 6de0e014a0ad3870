"""A process that has imported what scripts need, and has opened nothing: every script runs in a fork of it.

`python -m tests.zygote FD MODULE...` imports also these modules, and waits for scripts at this socket. A fork is as
good as a new process, and a second quicker.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import sys
import types
from collections.abc import Sequence
from typing import Any

STDIN, STDOUT, STDERR = range(3)


def _preload(modules: Sequence[str]) -> None:
    import httpx  # noqa: F401

    import replaybuf.cli
    import replaybuf.web
    import tests.scripts
    from replaybuf import ReplayBufferConfig, produce  # noqa: F401

    exec(tests.scripts.BEGINNING, {})
    for package in (replaybuf.cli, replaybuf.web):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    for name in modules:
        importlib.import_module(name)
    for url in ("memory://", "postgresql://nobody@nowhere/none"):
        ReplayBufferConfig(url=url).build()
    gc.collect()
    gc.freeze()  # no fork has to look through what all of them share


def _wait_for_script(control: socket.socket) -> dict[str, Any] | None:
    """Return the script that this process, a fork, has to run; None when nobody wants any more."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}  # the process, and where its exit code is awaited
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(reading, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == reading:
                    os.read(reading, 1000)
                    _reap(running)
                    continue
                request, files, *_ = socket.recv_fds(control, 1 << 20, 4)
                if not request:
                    return None
                input_file, output_file, error_file, end_file = files
                if (process := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.dup2(input_file, STDIN)
                    os.dup2(output_file, STDOUT)
                    os.dup2(error_file, STDERR)
                    for end in (*files, reading, writing, *running.values()):
                        os.close(end)
                    _open_standard_streams()
                    return dict(json.loads(request))
                for file in (input_file, output_file, error_file):
                    os.close(file)
                os.write(end_file, b"%d\n" % process)
                running[process] = end_file


def _open_standard_streams() -> None:
    """Open those of Python anew: the former know of their files whether one can seek in them."""
    sys.stdin = open(STDIN, closefd=False)  # noqa: SIM115
    sys.stdout = open(STDOUT, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(STDERR, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _reap(running: dict[int, int]) -> None:
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return
        os.write(running[process], b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(running.pop(process))


if __name__ == "__main__":
    _preload(sys.argv[2:])
    with socket.socket(fileno=int(sys.argv[1])) as control:
        script = _wait_for_script(control)
    if script is not None:
        sys.argv = ["-c", *script["arguments"]]
        os.environ.clear()
        os.environ.update(script["environment"])
        os.chdir(script["folder"])
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(script["text"], "<script>", "exec"), sys.modules["__main__"].__dict__)
