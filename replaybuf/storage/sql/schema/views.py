"""The views for people: of groups and rollouts (`group_views`), and of what was done (`record_views`)."""

from __future__ import annotations

from replaybuf.storage.sql.schema.group_views import GROUP_VIEWS
from replaybuf.storage.sql.schema.record_views import RECORD_VIEWS

#: The statements that create the views, by dialect and view.
CREATE_VIEWS = {dialect: GROUP_VIEWS[dialect] | RECORD_VIEWS[dialect] for dialect in ("sqlite", "postgresql")}
VIEWS = tuple(CREATE_VIEWS["sqlite"])
