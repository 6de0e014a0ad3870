"""Several buffers in one database, races, leases, the archive, and tallies."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

NAME = sa.Text().with_variant(sa.String(collation="C"), "postgresql")
NUMBER = sa.Float().with_variant(postgresql.DOUBLE_PRECISION(), "postgresql")


def upgrade() -> None:
    _tallies()
    _lanes()
    for column in (
        sa.Column("uniform_key", NUMBER),
        sa.Column("prioritized_key", NUMBER),
        sa.Column("deliveries", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("lease", sa.BigInteger),
        sa.Column("leased_until", NUMBER),
        sa.Column("archived_at", NUMBER),
    ):
        op.add_column("rb_group", column)
    _partial_index("rb_group_by_uniform_key", ["lane", "uniform_key", "uid"], "uniform_key IS NOT NULL")
    _partial_index(
        "rb_group_by_prioritized_key", ["lane", "prioritized_key", "uid", "priority"], "prioritized_key IS NOT NULL"
    )
    _partial_index("rb_group_leased", ["leased_until"], "leased_until IS NOT NULL")
    _partial_index("rb_group_archived", ["lane", "archived_at", "uid"], "archived_at IS NOT NULL")
    op.execute(
        "UPDATE rb_group SET archived_at = created_at WHERE lane IN (SELECT id FROM rb_lane WHERE status = 'archived')"
    )
    _keys()


def _tallies() -> None:
    """Begin the tallies with the existing groups, and the dropped ones."""
    op.create_table(
        "rb_tally",
        sa.Column("lane", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("shard", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("lane", "name", "shard"),
        postgresql_with={"fillfactor": "50", "autovacuum_vacuum_threshold": "1000"},
    )
    counted = "SELECT lane, '{}', 0, count(*) FROM rb_group GROUP BY lane"
    op.execute(f"INSERT INTO rb_tally (lane, name, shard, amount) {counted.format('size')}")
    op.execute(
        "INSERT INTO rb_tally (lane, name, shard, amount) "
        "SELECT id, 'dropped', 0, dropped FROM rb_lane WHERE dropped > 0"
    )
    op.execute(
        "INSERT INTO rb_tally (lane, name, shard, amount) "
        "SELECT lane, 'put', 0, sum(amount) FROM rb_tally GROUP BY lane"
    )


def _lanes() -> None:
    with op.batch_alter_table("rb_lane") as lane:
        lane.add_column(sa.Column("buffer", NAME))
        lane.add_column(sa.Column("leased", sa.Boolean))
        lane.add_column(sa.Column("uniform_clock", NUMBER))
        lane.add_column(sa.Column("prioritized_clock", NUMBER))
        lane.add_column(sa.Column("idle_clock", NUMBER))
    op.execute("UPDATE rb_lane SET buffer = 'default', leased = false")
    with op.batch_alter_table("rb_lane") as lane:
        lane.drop_constraint("rb_lane_task_status", type_="unique")
        lane.drop_column("dropped")
        lane.alter_column("buffer", nullable=False, existing_type=NAME)
        lane.alter_column("leased", nullable=False, existing_type=sa.Boolean())
        lane.create_unique_constraint("rb_lane_of_task", ["buffer", "task_name", "status", "leased"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE rb_lane SET (fillfactor = 50)")


def _keys() -> None:
    """Add the name of the buffer to the keys of puts."""
    connection = op.get_bind()
    rows = connection.execute(sa.text("SELECT uid, scoped_key FROM rb_group WHERE scoped_key IS NOT NULL")).all()
    if rows:
        connection.execute(
            sa.text("UPDATE rb_group SET scoped_key = :key WHERE uid = :uid"),
            [{"uid": uid, "key": json.dumps([*json.loads(key), "default"], ensure_ascii=False)} for uid, key in rows],
        )


def _partial_index(name: str, columns: list[str], where: str) -> None:
    condition = sa.text(where)
    op.create_index(name, "rb_group", columns, sqlite_where=condition, postgresql_where=condition)


def downgrade() -> None:
    raise RuntimeError("groups that are leased or archived have no place in the older schema")
