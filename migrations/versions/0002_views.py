"""Views for people: groups and rollouts."""

from __future__ import annotations

from alembic import op

from replaybuf.storage.sql.views import CREATE_VIEWS, VIEWS

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for statement in CREATE_VIEWS[op.get_bind().dialect.name]:
        op.execute(statement)


def downgrade() -> None:
    for view in VIEWS:
        op.execute(f"DROP VIEW {view}")
