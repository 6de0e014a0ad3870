"""The command `replaybuf`, for inspecting a buffer during a run. Most subcommands only read.

Slow imports are deferred: `commands` and a command's module are imported at its call, and rich, asyncpg, alembic and
the codec only by the commands that use them.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the program `replaybuf`."""
    try:
        from replaybuf.cli.commands import run

        run()
    except KeyboardInterrupt:  # in the imports: a command ends with the same code
        sys.exit(130)
