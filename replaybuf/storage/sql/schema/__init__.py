"""Tables, views, and their creation; the revisions of the schema, which are read without SQLAlchemy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replaybuf.errors import StorageError

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.transaction import Transaction

#: The revisions of the alembic chain, oldest first; this version of replaybuf works with the last one.
REVISIONS = ("0001",)
HEAD = REVISIONS[-1]
VERSION_TABLE = "rb_version"

#: The staleness of a group `g` in a lane `l`, in train steps, as text of SQL; and the train step for which that of its
#: rollouts is: of the last refresh, NULL if there was none since the put or the expiry.
STALENESS = "CASE WHEN g.pinned_staleness IS NOT NULL THEN g.pinned_staleness ELSE l.step - g.oldest_step - 1 END"
REFRESHED_TO = "CASE WHEN g.pinned_staleness IS NULL THEN l.step ELSE g.pinned_step END"


def check_schema(tx: Transaction, where: str) -> bool:
    """Return whether there is a schema. Raises StorageError when it is of another version of replaybuf."""
    revision = tx.revision()
    if revision in (None, HEAD):
        return revision is not None
    if revision in REVISIONS:
        raise StorageError(
            f"{where} has the schema of an older replaybuf (revision {revision}, wanted {HEAD}); "
            f"close all users of it, then run: replaybuf doctor {where} --upgrade",
            reason="schema",
        )
    raise StorageError(
        f"{where} has a schema that this replaybuf doesn't know (revision {revision}, newest known {HEAD}): "
        "it was made by a newer version; upgrade replaybuf here, to the version that its run has",
        reason="schema",
    )


def no_tables_error(where: str) -> StorageError:
    """Return the error for a reader of a database without a schema."""
    return StorageError(
        f"{where} has no replaybuf tables; check the name, or wait until a run has opened it", reason="not a database"
    )
