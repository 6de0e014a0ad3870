"""Copies of a buffer, from a database into a snapshot file and back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass

from replaybuf.errors import ConfigError, NotADatabaseError
from replaybuf.progress import OnProgress
from replaybuf.storage.sql.copies.snapshot import copy_to
from replaybuf.storage.sql.copies.snapshot_file import read_snapshot_facts
from replaybuf.storage.sql.engine.opening import open_database
from replaybuf.storage.sql.engine.sqlite_files import is_wal
from replaybuf.storage.sql.engine.transaction import Scope
from replaybuf.storage.sql.engine.urls import is_memory, public_url, url_or_path
from replaybuf.storage.sql.inspection.group_payloads import read_places
from replaybuf.storage.sql.inspection.groups import DEFAULT as DEFAULT
from replaybuf.storage.sql.inspection.reader import LOCK_TIMEOUT, Reader, open_reader
from replaybuf.storage.sql.statements.fence import joined


def save_snapshot(
    reader: Reader, name: str, file: str, about: Mapping[str, str], tell: OnProgress, *, whole: bool = True
) -> None:
    """Write a snapshot of a buffer, with facts about it, and with all payloads if it is to be `whole`."""
    # Who copies what is kept apart writes that it does: it isn't written over meanwhile.
    writes = whole and reader.path is None and bool(reader.read(read_places))

    async def save() -> None:
        read_only = opens_read_only(reader) and not writes
        engine = open_database(reader.url, lock_timeout=LOCK_TIMEOUT, read_only=read_only)
        try:
            scope = await engine.read(joined, Scope(name))
            await copy_to(engine, scope, file, about, tell, whole=whole)
        finally:
            await engine.dispose()

    asyncio.run(save())


def opens_read_only(reader: Reader) -> bool:
    """Return whether the database is to be opened read-only by who only reads: unless it is a SQLite file with a log.

    The last connection to such a file removes the log, unless it is read-only: then an empty one would be left behind.
    """
    return not (reader.path is not None and os.access(reader.path, os.W_OK) and is_wal(reader.path))


def policy_of(file: str) -> str | None:
    """Return the policy of a snapshot, None for any. Raises SnapshotError or SchemaError when it isn't a snapshot."""
    return asyncio.run(read_snapshot_facts(file)).get("policy")


@dataclass(frozen=True, slots=True)
class Target:
    """A database to load a snapshot into, possibly a SQLite file that doesn't exist yet. `where` has no password."""

    url: str
    where: str

    @classmethod
    def at(cls, url: str) -> Target:
        """Return the database of a URL or path. Connects to nothing yet."""
        parsed = url_or_path(url)
        if is_memory(parsed):
            raise ConfigError("a SQLite database in memory would be gone with this command; give a file or a server")
        return cls(parsed.render_as_string(hide_password=False), public_url(parsed))


def exists(target: Target) -> bool:
    """Return whether the database has replaybuf's tables; a SQLite file that isn't there has none."""
    path = url_or_path(target.url).database
    if target.url.startswith("sqlite") and not (path and os.path.exists(path)):
        return False
    try:
        open_reader(target.url).read(lambda tx: None)
    except NotADatabaseError:
        return False
    return True
