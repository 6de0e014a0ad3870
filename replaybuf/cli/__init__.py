"""The command `replaybuf`, for inspecting a buffer during a run. Most subcommands only read.

Slow imports are deferred: `commands` and a command's module are imported at its call, and rich, asyncpg, alembic and
the codec only by the commands that use them.
"""

from __future__ import annotations

import sys

from replaybuf import __version__

_INTERRUPTED = 128 + 2  # the exit code of a program ended by SIGINT, as shells report it


def main() -> None:
    """Run the program `replaybuf`."""
    if sys.argv[1:] == ["--version"]:
        print(__version__)
        return
    try:
        from replaybuf.cli.commands import run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
