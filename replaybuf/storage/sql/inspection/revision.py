"""The revision of a database's schema, and what it means for this version of replaybuf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from replaybuf.storage.sql.schema.revisions import HEAD, REVISIONS


class State(Enum):
    """How a revision relates to this version of replaybuf."""

    MISSING = auto()
    CURRENT = auto()
    OLDER = auto()
    NEWER = auto()


@dataclass(frozen=True, slots=True)
class Revision:
    """The revision of a schema (None when there is none), and the one that this replaybuf works with."""

    found: str | None
    wanted: str = HEAD

    @property
    def state(self) -> State:
        if self.found is None:
            return State.MISSING
        if self.found == self.wanted:
            return State.CURRENT
        return State.OLDER if self.found in REVISIONS else State.NEWER
