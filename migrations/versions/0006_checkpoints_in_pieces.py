"""Checkpoints are made in pieces: one that isn't whole says how far it is, and leaves others of its step alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    last = _last_number()
    with op.batch_alter_table("rb_checkpoint", table_kwargs={"sqlite_autoincrement": True}) as checkpoint:
        checkpoint.add_column(sa.Column("copied_to", sa.BigInteger))
        checkpoint.drop_constraint("rb_checkpoint_of_step", type_="unique")
    whole = sa.text("copied_to IS NULL")
    columns = ["buffer", "step"]
    op.create_index(
        "rb_checkpoint_of_step", "rb_checkpoint", columns, unique=True, sqlite_where=whole, postgresql_where=whole
    )
    if last is not None:
        op.execute(sa.text("UPDATE sqlite_sequence SET seq = :last WHERE name = 'rb_checkpoint'").bindparams(last=last))


def _last_number() -> int | None:
    """Return the number of the last checkpoint on SQLite, which a table that is made anew forgets.

    The groups of one that was dropped may not have been swept yet: another of its number would have them, too.
    """
    if op.get_bind().dialect.name != "sqlite":
        return None
    return op.get_bind().execute(sa.text("SELECT seq FROM sqlite_sequence WHERE name = 'rb_checkpoint'")).scalar()


def downgrade() -> None:
    raise RuntimeError("a checkpoint that is being made has no place in the older schema")
