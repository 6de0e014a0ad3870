"""The tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NAME = sa.Text().with_variant(sa.String(collation="C"), "postgresql")
NUMBER = sa.Float().with_variant(postgresql.DOUBLE_PRECISION(), "postgresql")
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    postgres = op.get_bind().dialect.name == "postgresql"
    if postgres:
        op.execute(sa.schema.CreateSequence(sa.Sequence("rb_uid")))
    op.create_table(
        "rb_lane",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("task_name", NAME, nullable=False),
        sa.Column("status", NAME, nullable=False),
        sa.Column("step", sa.BigInteger),
        sa.Column("dropped", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("task_name", "status", name="rb_lane_task_status"),
    )
    op.create_table(
        "rb_group",
        sa.Column("uid", ID, nullable=False, autoincrement=False),
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
        sa.PrimaryKeyConstraint("uid"),
        postgresql_with={"fillfactor": "80", "autovacuum_vacuum_scale_factor": "0.02"},
    )
    op.create_table(
        "rb_payload",
        sa.Column("uid", ID, nullable=False, autoincrement=False),
        sa.Column("outline", JSON, nullable=False),
        sa.Column("prompt", sa.Text),
        sa.Column("file", sa.BigInteger),
        sa.Column("size", sa.BigInteger),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("uid"),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.02", "toast.autovacuum_vacuum_scale_factor": "0.02"},
    )
    op.create_table(
        "rb_garbage",
        sa.Column("uid", ID, nullable=False, autoincrement=False),
        sa.Column("removed_at", NUMBER, nullable=False),
        sa.PrimaryKeyConstraint("uid"),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.02"},
    )
    op.create_table(
        "rb_counter",
        sa.Column("name", NAME, nullable=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "rb_info",
        sa.Column("name", NAME, nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_index("rb_group_in_order", "rb_group", ["lane", "uid"])
    _partial_index("rb_group_by_step", ["lane", "oldest_step", "uid"], "pinned_staleness IS NULL")
    _partial_index(
        "rb_group_by_pinned", ["lane", sa.text("pinned_staleness DESC"), "uid"], "pinned_staleness IS NOT NULL"
    )
    _partial_index(
        "rb_group_unsettled",
        ["lane"],
        "pinned_staleness IS NOT NULL AND (oldest_step IS NOT NULL OR pinned_step IS NULL)",
    )
    _partial_index("rb_group_key", ["scoped_key"], "scoped_key IS NOT NULL", unique=True)
    op.create_index("rb_garbage_in_order", "rb_garbage", ["removed_at"])
    op.execute("INSERT INTO rb_counter (name, value) VALUES ('uid', 0)")
    if postgres:
        op.execute("ALTER TABLE rb_payload ALTER COLUMN data SET STORAGE EXTERNAL")


def _partial_index(name: str, columns: list[object], where: str, unique: bool = False) -> None:
    condition = sa.text(where)
    op.create_index(name, "rb_group", columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


def downgrade() -> None:
    for table in ("rb_info", "rb_counter", "rb_garbage", "rb_payload", "rb_group", "rb_lane"):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute(sa.schema.DropSequence(sa.Sequence("rb_uid")))
