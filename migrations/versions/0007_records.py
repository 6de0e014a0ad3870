"""Who did what, and when: batches, workers, waiters, events, history; groups know who made and who holds them.

Payloads are vacuumed without pauses on PostgreSQL."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

NAME = sa.Text().with_variant(sa.String(collation="C"), "postgresql")
NUMBER = sa.Float().with_variant(postgresql.DOUBLE_PRECISION(), "postgresql")
JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    for table in ("rb_group", "rb_checkpoint_group"):
        op.add_column(table, sa.Column("worker", NAME))
        op.add_column(table, sa.Column("put_step", sa.BigInteger))
        op.add_column(table, sa.Column("holder", NAME))
        op.add_column(table, sa.Column("trained_step", sa.BigInteger))
    _create_batches()
    _create_workers()
    _create_events()
    info = sa.table("rb_info", sa.column("name"), sa.column("value"))
    op.execute(info.insert().values(name="identity", value=uuid.uuid4().hex))
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE rb_payload SET (autovacuum_vacuum_cost_delay=0, toast.autovacuum_vacuum_cost_delay=0)")


def _create_batches() -> None:
    op.create_table(
        "rb_batch",
        sa.Column("id", ID, primary_key=True),
        sa.Column("buffer", NAME, nullable=False),
        sa.Column("taken_at", NUMBER, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger),
        sa.Column("status", NAME, nullable=False),
        sa.Column("worker", NAME),
        sa.Column("lease", sa.BigInteger),
        sa.Column("groups", sa.Integer, nullable=False),
        sa.Column("settled", sa.Integer, nullable=False),
        sa.Column("reward", NUMBER),
        sa.Column("min_reward", NUMBER),
        sa.Column("max_reward", NUMBER),
        sa.Column("staleness", NUMBER),
        sa.Column("max_staleness", sa.BigInteger),
        sa.Column("oldest_step", sa.BigInteger),
        sa.Column("newest_step", sa.BigInteger),
        sa.Column("first_uid", sa.BigInteger, nullable=False),
        sa.Column("last_uid", sa.BigInteger, nullable=False),
        sa.Column("members", JSON, nullable=False),
    )
    op.create_index("rb_batch_by_step", "rb_batch", ["step", "buffer"])
    leased = sa.text("lease IS NOT NULL")
    op.create_index("rb_batch_by_lease", "rb_batch", ["lease"], sqlite_where=leased, postgresql_where=leased)


def _create_workers() -> None:
    op.create_table(
        "rb_worker",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("buffer", NAME, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("host", NAME, nullable=False),
        sa.Column("pid", sa.BigInteger, nullable=False),
        sa.Column("started_at", NUMBER, nullable=False),
        sa.Column("seen_at", NUMBER, nullable=False),
        sa.Column("ended_at", NUMBER),
        sa.UniqueConstraint("buffer", "name", "host", "pid", name="rb_worker_of_process"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "rb_activity",
        sa.Column("worker_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("since", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("groups", sa.BigInteger, nullable=False),
        sa.Column("rollouts", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("failures", sa.BigInteger, nullable=False),
        sa.Column("taken", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "rb_waiter",
        sa.Column("worker_id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("kind", NAME, nullable=False),
        sa.Column("wants", JSON, nullable=False),
        sa.Column("status", NAME),
        sa.Column("query", sa.Text),
        sa.Column("since", NUMBER, nullable=False),
        sa.Column("deadline", NUMBER),
        sa.Column("seen_at", NUMBER, nullable=False),
        sa.Column("limits", JSON, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
    )


def _create_events() -> None:
    op.create_table(
        "rb_event",
        sa.Column("id", ID, primary_key=True),
        sa.Column("buffer", NAME, nullable=False),
        sa.Column("happened_at", NUMBER, nullable=False),
        sa.Column("kind", NAME, nullable=False),
        sa.Column("task_name", NAME),
        sa.Column("worker", NAME),
        sa.Column("step", sa.BigInteger),
        sa.Column("groups", sa.BigInteger, nullable=False),
        sa.Column("uids", JSON),
        sa.Column("detail", sa.Text),
        sqlite_autoincrement=True,
    )
    op.create_index("rb_event_by_time", "rb_event", ["buffer", "happened_at"])
    op.create_table(
        "rb_history",
        sa.Column("buffer", NAME, primary_key=True),
        sa.Column("since", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("data", JSON, nullable=False),
    )


def downgrade() -> None:
    raise RuntimeError("who did what has no place in the older schema")
