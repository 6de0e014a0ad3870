"""Single keys from a terminal, without waiting for Enter and without blocking."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def keys() -> Iterator[Keys]:
    """Have the terminal give keys one by one; it is as it was afterwards. Without a terminal no key comes."""
    try:
        import termios
        import tty

        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (ImportError, OSError, ValueError, termios.error):
        yield Keys(None)
        return
    try:
        tty.setcbreak(fd)
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


class Keys:
    """The keys that were pressed."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def wait(self, seconds: float) -> str:
        """Wait so long for a key, and return it; "" if none came, "q" if none will come any more."""
        if self._fd is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if not ready:
            return ""
        return os.read(self._fd, 1).decode("ascii", "replace") or "q"
