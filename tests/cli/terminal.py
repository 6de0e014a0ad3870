"""A real terminal to run the command in: tmux, which knows what every escape does, and gives what can be seen."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
SIZES = [(80, 24), (200, 50)]
_ENDED = "ended with"


class Terminal:
    """A terminal with one program in it."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]

    def tmux(self, *args: str) -> str:
        process = subprocess.run([*self._tmux, *args], capture_output=True, check=True, timeout=20)
        return process.stdout.decode("utf-8", "replace")

    def start(self, size: tuple[int, int], *args: object) -> None:
        command = shlex.join([sys.executable, "-m", "replaybuf", *map(str, args)])
        width, height = map(str, size)
        # The shell stays, so that it is seen how the program left the terminal.
        script = f"{command}; echo {_ENDED} $?; stty -a; sleep 60"
        self.tmux("new-session", "-d", "-x", width, "-y", height, script)

    def seen(self) -> str:
        return self.tmux("capture-pane", "-p")

    def wait(self, sign: str | Callable[[str], bool], seconds: float = 30) -> str:
        """Wait until something is to be seen, and return all that is."""
        holds = sign if callable(sign) else lambda text: sign in text
        until = time.monotonic() + seconds
        while not holds(screen := self.seen()):
            assert time.monotonic() < until, f"after {seconds} s there is no {sign!r} in:\n{screen}"
            time.sleep(0.05)
        return screen

    def press(self, key: str) -> None:
        self.tmux("send-keys", key)

    def resize(self, size: tuple[int, int]) -> None:
        self.tmux("resize-window", "-x", str(size[0]), "-y", str(size[1]))

    def wait_for_end(self, code: int) -> None:
        """Wait for the end of the program; the terminal must be as it was before."""
        screen = self.wait(lambda text: f"{_ENDED} {code}" in text and "-parenb" in text and "icanon" in text)
        assert " icanon" in screen
        assert " echo " in screen
        assert "Traceback" not in screen
        assert self.tmux("display-message", "-p", "#{alternate_on} #{cursor_flag}").split() == ["0", "1"]


@contextmanager
def terminal(folder: Path, **variables: str) -> Iterator[Terminal]:
    root = str(Path(__file__).parents[2])
    before = dict(os.environ)
    os.environ.update(PYTHONPATH=root, TERM="screen-256color", LC_ALL="C.UTF-8", **variables)
    opened = Terminal(folder / "tmux")
    try:
        yield opened
    finally:
        os.environ.clear()
        os.environ.update(before)
        subprocess.run([*opened._tmux, "kill-server"], capture_output=True, check=False, timeout=20)
