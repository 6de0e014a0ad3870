"""Payloads may be kept apart: files with their arrays, and the places of these."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

NUMBER = sa.Float().with_variant(postgresql.DOUBLE_PRECISION(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "rb_place",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("listed_at", NUMBER),
        sa.Column("kept_until", NUMBER),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "rb_file",
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("groups", sa.Integer, nullable=False),
        postgresql_with={"fillfactor": "50"},
    )
    empty = sa.text("groups = 0")
    op.create_index("rb_file_empty", "rb_file", ["id"], sqlite_where=empty, postgresql_where=empty)


def downgrade() -> None:
    raise RuntimeError("payloads that are kept apart have no place in the older schema")
