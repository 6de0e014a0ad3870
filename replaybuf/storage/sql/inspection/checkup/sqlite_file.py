"""SQLite: the settings and state of the file, and where it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import text

from replaybuf.storage.sql.engine.filesystem import filesystem_type, is_network
from replaybuf.storage.sql.engine.sqlite_connections import PAGE_SIZE
from replaybuf.storage.sql.engine.sqlite_files import is_wal
from replaybuf.storage.sql.engine.sqlite_log import LONG_PAGES
from replaybuf.storage.sql.engine.transaction import Transaction

#: The page size of replaybuf's files; the size at which a log is copied into the database.
PAGE_BYTES = PAGE_SIZE
LOG_BYTES = LONG_PAGES * PAGE_SIZE

_MOST_MESSAGES = 100


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a file, and the network file system that it is on, if any."""

    wal: bool
    page_bytes: int
    encoding: str
    version: str
    network: str | None


@dataclass(frozen=True, slots=True)
class Pages:
    """The bytes of all pages, and of the free ones among them."""

    bytes: int
    free: int


def read_settings(tx: Transaction, path: Path) -> Settings:
    """Return the settings of the file."""
    kind = filesystem_type(path)
    return Settings(
        wal=is_wal(path),  # the pragma doesn't show it when nobody has the file open
        page_bytes=_number(tx, "page_size"),
        encoding=_pragma(tx, "encoding"),
        version=str(tx.execute(text("SELECT sqlite_version()")).scalar()),
        network=kind if is_network(kind) else None,
    )


def read_pages(tx: Transaction) -> Pages:
    """Return how much of the file is used and free."""
    size = _number(tx, "page_size")
    return Pages(_number(tx, "page_count") * size, _number(tx, "freelist_count") * size)


def integrity_messages(tx: Transaction, check: str) -> list[str]:
    """Return the findings of SQLite's own check, `quick_check` or `integrity_check`."""
    rows = tx.execute(text(f"PRAGMA {check}({_MOST_MESSAGES})")).scalars()
    return [str(row).replace("*** in database main ***\n", "") for row in rows if row != "ok"]


def make_indexes_anew(tx: Transaction) -> None:
    """Rebuild all indexes from their tables."""
    tx.execute(text("REINDEX"))


def _pragma(tx: Transaction, name: str) -> str:
    return str(tx.execute(text(f"PRAGMA {name}")).scalar())


def _number(tx: Transaction, name: str) -> int:
    return int(_pragma(tx, name))
