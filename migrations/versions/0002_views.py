"""Views for people: groups and rollouts.

Views hold no data: they are recreated at the end of every run of the chain (`env.py`), from
`storage/sql/schema/views.py`.
"""

from __future__ import annotations

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
