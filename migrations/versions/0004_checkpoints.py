"""Step checkpoints, epochs that fence off processes from before a restore, cursors of prompt ledgers, tickets."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

NAME = sa.Text().with_variant(sa.String(collation="C"), "postgresql")
NUMBER = sa.Float().with_variant(postgresql.DOUBLE_PRECISION(), "postgresql")
JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("rb_group", sa.Column("ticket", sa.BigInteger))
    op.add_column("rb_group", sa.Column("made_from", JSON))
    op.create_table(
        "rb_buffer",
        sa.Column("name", NAME, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("ticket_shift", sa.BigInteger, nullable=False),
        sa.Column("restored_step", sa.BigInteger),
        sa.Column("restored_at", NUMBER),
    )
    op.create_table(
        "rb_cursor",
        sa.Column("buffer", NAME, primary_key=True),
        sa.Column("name", NAME, primary_key=True),
        sa.Column("checkpoint", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "rb_checkpoint",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("buffer", NAME, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("groups", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("next_ticket", sa.BigInteger, nullable=False),
        sa.Column("lanes", JSON, nullable=False),
        sa.Column("tallies", JSON, nullable=False),
        sa.UniqueConstraint("buffer", "step", name="rb_checkpoint_of_step"),
        sqlite_autoincrement=True,
    )
    _create_checkpoint_group()


def _create_checkpoint_group() -> None:
    op.create_table(
        "rb_checkpoint_group",
        sa.Column("checkpoint", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("uid", ID, primary_key=True, autoincrement=False),
        sa.Column("lane", sa.Integer, nullable=False),
        sa.Column("oldest_step", sa.BigInteger),
        sa.Column("pinned_staleness", sa.BigInteger),
        sa.Column("pinned_step", sa.BigInteger),
        sa.Column("mixed", sa.Boolean, nullable=False),
        sa.Column("priority", NUMBER, nullable=False),
        sa.Column("times_sampled", sa.Integer, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("reward", NUMBER),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("marks", JSON, nullable=False),
        sa.Column("tags", JSON),
        sa.Column("scoped_key", NAME),
        sa.Column("error", sa.Text),
        sa.Column("uniform_key", NUMBER),
        sa.Column("prioritized_key", NUMBER),
        sa.Column("deliveries", sa.Integer, nullable=False),
        sa.Column("lease", sa.BigInteger),
        sa.Column("leased_until", NUMBER),
        sa.Column("archived_at", NUMBER),
        sa.Column("ticket", sa.BigInteger),
        sa.Column("made_from", JSON),
        sqlite_with_rowid=False,
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.02"},
    )


def downgrade() -> None:
    raise RuntimeError("step checkpoints have no place in the older schema")
