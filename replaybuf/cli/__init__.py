"""The command `replaybuf`: looking into a buffer while a run goes on. Most of it only reads.

Slow imports are made where they are needed: a command's module (`app`) when it is called, and rich, asyncpg, alembic
and the codec by the commands that use them.
"""

from __future__ import annotations

import sys

from replaybuf import __version__

_INTERRUPTED = 128 + 2  # what shells report for a program that a signal ended


def main() -> None:
    """Run the program `replaybuf`."""
    if sys.argv[1:] == ["--version"]:
        print(__version__)
        return
    try:
        from replaybuf.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
