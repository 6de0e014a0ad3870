"""Checks that the tables, columns, indexes and views are those of this version of replaybuf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replaybuf.doctor.finding import Check, Finding, Look, fine, problem, repairable, some
from replaybuf.storage.sql.inspection.checkup import tables
from replaybuf.storage.sql.inspection.revision import State
from replaybuf.storage.sql.inspection.schema import read_revision

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_REVISION, _TABLES, _INDEXES, _VIEWS = "revision", "tables", "indexes", "views"


def look_at_revision(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check the revision of the schema. Without the right one no other check makes sense."""
    revision = read_revision(tx)
    found, wanted = revision.found, revision.wanted
    match revision.state:
        case State.CURRENT:
            return [fine(_REVISION, f"schema {wanted}")]
        case State.MISSING:
            return [problem(_REVISION, "no replaybuf tables", "check the name, or wait until a run has opened it")]
        case State.OLDER:
            mend = f"close all users of it, then: replaybuf db upgrade {look.where}"
            return [problem(_REVISION, f"schema {found} of an older replaybuf, wanted {wanted}", mend)]
        case State.NEWER:
            text = f"schema {found}, which this replaybuf doesn't know (newest known {wanted})"
            return [problem(_REVISION, text, "upgrade replaybuf here, to the version that its run has")]


def look_at_tables(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether all tables are there, with their columns."""
    mend = "restore the database from a snapshot or a backup"
    if missing := tables.missing_tables(tx):
        return [problem(_TABLES, f"missing: {', '.join(missing)}", mend)]
    if wrong := tables.wrong_columns(tx):
        return [problem(_TABLES, f"columns that are missing or not as they were made: {some(wrong)}", mend)]
    return [fine(_TABLES, f"{len(tables.TABLES)} tables with their columns")]


def look_at_indexes(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether all indexes are there, valid and over the right columns."""
    if wrong := tables.wrong_indexes(tx):
        return [repairable(_INDEXES, some([f"{name} {why}" for name, why in wrong.items()]))]
    return [fine(_INDEXES, f"{len(tables.INDEXES)} indexes")]


def repair_indexes(tx: Transaction, look: Look) -> Sequence[str]:
    """Build the indexes that are missing or wrong."""
    return [f"made the index {name}, which {why}" for name, why in tables.make_indexes(tx).items()]


def look_at_views(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether the views for people are there."""
    if missing := tables.missing_views(tx):
        return [repairable(_VIEWS, f"missing: {', '.join(missing)}")]
    return [fine(_VIEWS, " and ".join(tables.VIEWS))]


def repair_views(tx: Transaction, look: Look) -> Sequence[str]:
    """Create the views anew."""
    made = tables.make_views(tx)
    return [f"made the views {', '.join(made)}"] if made else []


REVISION = Check(_REVISION, look_at_revision)
CHECKS = (
    Check(_TABLES, look_at_tables),
    Check(_INDEXES, look_at_indexes, repair_indexes),
    Check(_VIEWS, look_at_views, repair_views),
)
