"""The revisions of the schema."""

from __future__ import annotations

from replaybuf.errors import SchemaError

#: The revisions of the alembic chain, oldest first; this version of replaybuf works with the last one.
REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008")
HEAD = REVISIONS[-1]
VERSION_TABLE = "rb_version"


def check_revision(revision: str | None, where: str) -> bool:
    """Return whether there is a schema. Raises SchemaError when it is older or newer than this version of replaybuf."""
    if revision is None:
        return False
    if revision == HEAD:
        return True
    if revision in REVISIONS:
        raise SchemaError(
            f"{where} has the schema of an older replaybuf (revision {revision}, wanted {HEAD}); "
            f"close all users of it, then run: replaybuf db upgrade {where}"
        )
    raise SchemaError(
        f"{where} has a schema that this replaybuf doesn't know (revision {revision}, newest known {HEAD}): "
        "it was made by a newer version; upgrade replaybuf here, to the version that its run has"
    )
