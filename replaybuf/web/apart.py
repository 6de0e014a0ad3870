"""Runs a statement typed into the page in a subprocess, which is killed at the time limit.

Limits inside a database (statement timeout, SQLite's progress handler) don't interrupt every function, and don't bound
memory; a separate process allows both.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgpack  # type: ignore[import-untyped]

from replaybuf import errors
from replaybuf.errors import LockedError, QueryError, ReplayBufError, StorageError
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.inspection.user_sql import run_statement

#: Bytes: the subprocess's memory limit, and the size limit of an answer.
MEMORY, ANSWER = 4 << 30, 64_000_000
#: Seconds beyond a statement's time limit after which its process is killed.
_GRACE = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A result set: unique column names, the first rows, and whether there are more rows."""

    names: Sequence[str]
    rows: Sequence[Sequence[Any]]
    is_cut: bool


def run_apart(reader: Reader, statement: str, seconds: float, rows: int, *, ours: bool) -> Answer:
    """Return the result of a statement: at most `rows` rows, and at most `ANSWER` bytes.

    Raises AccessError when the statement would write or isn't allowed for this role, LockedError when it takes longer
    than `seconds`, QueryError when it is invalid or needs too much memory.
    """
    url = reader.url.render_as_string(hide_password=False)
    job = msgpack.packb([url, statement, seconds, rows, ours])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "replaybuf.web.apart"],
            input=job,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=seconds + _GRACE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _too_long(seconds) from None
    if not done.stdout:
        raise QueryError("the statement ended its process: it needs too much memory")
    kind, *values = msgpack.unpackb(done.stdout, timestamp=3, strict_map_key=False)
    if kind == "answer":
        return Answer(*values)
    if kind == LockedError.__name__:
        raise _too_long(seconds)
    raise getattr(errors, kind)(*values)


def _too_long(seconds: float) -> LockedError:
    return LockedError(
        f"stopped after {seconds:g} s: name fewer columns or a smaller part of the run, or run it with "
        "`replaybuf sql`, whose --timeout is yours"
    )


def answer(url: str, statement: str, seconds: float, most: int, ours: bool) -> Answer:
    """Run a statement in this process, with the limits inside the database; `ours` if the page wrote the statement.

    Raises what `run_apart` does, except for the memory limit.
    """
    names, rows = run_statement(open_reader(url), statement, seconds, most=most + 1, guarded=not ours)
    kept: list[Sequence[Any]] = []
    size = 0
    for row in rows[:most]:
        kept.append(row)
        size += sum(len(value) for value in row if isinstance(value, str | bytes))
        if size > ANSWER:
            kept.pop()
            break
    return Answer(names, kept, len(kept) < len(rows))


def _portable(value: Any) -> Any:
    """Convert a database value that msgpack can't encode into one that it can."""
    if isinstance(value, Decimal):
        is_whole = value.is_finite() and value == value.to_integral_value() and abs(value) < 2**63
        return int(value) if is_whole else float(value)
    if isinstance(value, int):  # of more than 64 bits
        return float(value)
    if isinstance(value, datetime):  # without a time zone
        return value.replace(tzinfo=UTC)
    return value.isoformat() if isinstance(value, date) else str(value)


def _main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system limits memory
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    job = msgpack.unpackb(sys.stdin.buffer.read())
    try:
        found = answer(*job)
        told: list[Any] = ["answer", found.names, found.rows, found.is_cut]
    except ReplayBufError as error:
        known = isinstance(getattr(errors, type(error).__name__, None), type)
        told = [type(error).__name__ if known else StorageError.__name__, str(error)]
    except MemoryError:
        told = [QueryError.__name__, "the statement needs too much memory: name fewer columns, or fewer rows by LIMIT"]
    sys.stdout.buffer.write(msgpack.packb(told, datetime=True, unicode_errors="surrogatepass", default=_portable))


if __name__ == "__main__":
    _main()
