"""The buffers in a database, and their tasks."""

from __future__ import annotations

from replaybuf.errors import InputError
from replaybuf.redact import redact_path
from replaybuf.storage.sql.inspection.look import Look


def buffers_of(look: Look) -> list[str]:
    """Return the names of the buffers in the database."""
    return sorted(name for (name,) in look.table("SELECT DISTINCT buffer FROM rb_lane")[1])


def tasks_of(look: Look, buffer: str | None) -> list[str]:
    """Return the names of the tasks of one buffer or of all."""
    _, rows = look.table("SELECT DISTINCT buffer, task_name FROM rb_lane")
    return sorted({task for owner, task in rows if buffer in (None, owner)})


def check_buffer(look: Look, buffer: str | None) -> None:
    """Raise InputError when there are only buffers of other names."""
    if buffer is not None and (there := buffers_of(look)) and buffer not in there:
        raise InputError(
            f"there is no buffer {redact_path(buffer)!r:.200} in this database; there are {', '.join(there)}"
        )
