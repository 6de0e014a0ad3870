"""The tables, indexes and views of 0.1.0.

They are those of `replaybuf.storage.sql.schema`, which has the only definition of them: until 0.1.0 is released it is
also what this revision means. The first revision that follows writes its changes out, as all later ones do."""

from __future__ import annotations

from alembic import op

from replaybuf.storage.sql.inspection.writer import transaction_of
from replaybuf.storage.sql.schema.create import create_tables

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    create_tables(transaction_of(op.get_bind()))


def downgrade() -> None:
    raise RuntimeError("there is no older schema; copy the database before you upgrade it")
