"""The dialects of both databases."""

from __future__ import annotations

from collections.abc import Mapping

from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.postgres_dialect import POSTGRES
from replaybuf.storage.sql.engine.sqlite_dialect import SQLITE

#: By the names that SQLAlchemy has for them.
DIALECTS: Mapping[str, Dialect] = {one.name: one for one in (SQLITE, POSTGRES)}
