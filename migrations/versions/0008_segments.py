"""Payloads may be kept apart: where their arrays are, and the segments, places and users of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

NAME = sa.Text().with_variant(sa.String(collation="C"), "postgresql")
NUMBER = sa.Float().with_variant(postgresql.DOUBLE_PRECISION(), "postgresql")
ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("rb_payload", sa.Column("segment", sa.BigInteger))
    op.add_column("rb_payload", sa.Column("size", sa.BigInteger))
    apart = sa.text("segment IS NOT NULL")
    op.create_index(
        "rb_payload_of_segment", "rb_payload", ["segment", "uid"], sqlite_where=apart, postgresql_where=apart
    )
    op.create_table(
        "rb_place",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "rb_segment",
        sa.Column("id", ID, primary_key=True),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("file", sa.BigInteger),
        sa.Column("owner", sa.BigInteger),
        sa.Column("size", sa.BigInteger),
        sa.Column("live", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sqlite_autoincrement=True,
        postgresql_with={"fillfactor": "50"},
    )
    empty = sa.text("size IS NOT NULL AND live <= 0")
    op.create_index("rb_segment_empty", "rb_segment", ["id"], sqlite_where=empty, postgresql_where=empty)
    op.create_index("rb_segment_of_owner", "rb_segment", ["owner"])
    op.create_table(
        "rb_segment_user",
        sa.Column("id", ID, primary_key=True),
        sa.Column("worker", NAME),
        sa.Column("keeps", sa.Boolean, nullable=False),
        sa.Column("renewed_at", NUMBER, nullable=False),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    raise RuntimeError("payloads that are kept apart have no place in the older schema")
