"""The views show errors and the parts of rewards; on SQLite computed columns have a type. (`env.py` makes them.)"""

from __future__ import annotations

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    raise RuntimeError("the older views don't show what is stored since")
