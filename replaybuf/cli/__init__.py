"""The command `replaybuf`: looking into a buffer while a run goes on. Everything but `db upgrade` only reads.

What takes time to import (rich, asyncpg, alembic, the codec) is imported by the command that needs it.
"""

from replaybuf.cli.app import app, main

__all__ = ["app", "main"]
