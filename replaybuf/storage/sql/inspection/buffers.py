"""The buffers in a database, and their tasks."""

from __future__ import annotations

import re

from replaybuf.errors import InputError
from replaybuf.redact import redact_path
from replaybuf.storage.sql.inspection.look import Look

DEFAULT = "default"
_DIGITS = re.compile("([0-9]+)")


def in_order(name: str) -> tuple[list[str | tuple[int, str]], str]:
    """Return what buffers are sorted by wherever they are listed: run-2 comes before run-10."""
    parts = enumerate(_DIGITS.split(name))  # every other part is a number, of any length
    return [(len(part.lstrip("0")), part.lstrip("0")) if i % 2 else part for i, part in parts], name


def buffers_of(look: Look) -> list[str]:
    """Return the names of the buffers in the database, in order."""
    return sorted((name for (name,) in look.table("SELECT DISTINCT buffer FROM rb_lane")[1]), key=in_order)


def tasks_of(look: Look, buffer: str | None) -> list[str]:
    """Return the names of the tasks of one buffer or of all."""
    _, rows = look.table("SELECT DISTINCT buffer, task_name FROM rb_lane")
    return sorted({task for owner, task in rows if buffer in (None, owner)})


def opened_buffers(look: Look) -> list[str]:
    """Return the names of the buffers in the database, and of those that were opened, but never put into."""
    opened = {name for (name,) in look.table("SELECT DISTINCT buffer FROM rb_worker")[1]}
    return sorted(opened.union(buffers_of(look)), key=in_order)


def check_buffer(look: Look, buffer: str | None) -> None:
    """Raise InputError when there are only buffers of other names."""
    if buffer is not None and (there := opened_buffers(look)) and buffer not in there:
        raise InputError(
            f"there is no buffer {redact_path(buffer)!r:.200} in this database; there are {', '.join(there)}"
        )


def choose(look: Look, buffer: str | None) -> str:
    """Return the buffer of this name, or else the only one or the default one. Raises InputError."""
    check_buffer(look, buffer)
    there = buffers_of(look)
    if buffer is None and len(there) > 1 and DEFAULT not in there:
        raise InputError(f"there are several buffers in this database: choose one with --buffer: {', '.join(there)}")
    return buffer or (there[0] if len(there) == 1 else DEFAULT)
