"""Repairs of indexes and views."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text

from replaybuf.doctor.check_file import integrity_messages, only_of_indexes
from replaybuf.doctor.check_schema import missing_views, wrong_indexes
from replaybuf.doctor.findings import CheckContext
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.create import create_index, create_views, drop_views


def repair_integrity(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Rebuild indexes that differ from their tables."""
    messages = integrity_messages(tx, "integrity_check")
    if not messages or not only_of_indexes(messages):
        return []
    tx.execute(text("REINDEX"))
    return ["made all indexes anew"]


def repair_indexes(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Build the indexes that are missing or wrong."""
    wrong = list(wrong_indexes(tx))
    for index, _ in wrong:
        tx.execute(text(f"DROP INDEX IF EXISTS {index.name}"))
        create_index(tx, index)
    return [f"made the index {index.name}, which {why}" for index, why in wrong]


def repair_views(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Create the views anew."""
    missing = missing_views(tx)
    if missing:
        drop_views(tx)
        create_views(tx)
    return [f"made the views {', '.join(missing)}"] if missing else []
