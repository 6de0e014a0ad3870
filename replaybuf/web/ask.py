"""What a request asks for: parameters of its URL, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from replaybuf.errors import InputError

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.traces import StepSummary

LARGEST = 2**63 - 1
#: The parameters that pages know. Others are dropped: each link repeats those of its page.
PARAMETERS = frozenset(
    (
        *(
            "across",
            "after",
            "all",
            "before",
            "beside",
            "buffer",
            "by",
            "from",
            "hours",
            "kind",
            "order",
            "page",
            "size",
            "sort",
        ),
        *("sql", "status", "task", "to", "where", "worker"),
    )
)


#: The parameters that say which part of a table is shown.
_OF_A_TABLE = frozenset(("after", "before", "order", "page", "sort"))


@dataclass(frozen=True, slots=True)
class Ask:
    """The parameters of a URL's query, and the numbers in its path. Every reading raises InputError for a bad value.

    `others` are the names of runs of other databases and of exports, and `elsewhere` the train steps of the one that
    is asked for beside.
    """

    parameters: Mapping[str, str]
    path: Mapping[str, str] = field(default_factory=dict)
    others: Sequence[str] = ()
    elsewhere: Sequence[StepSummary] | None = None

    def text(self, name: str) -> str | None:
        """Return a text, or None when it isn't given or empty."""
        given = self.parameters.get(name) or None
        if given is not None and "\x00" in given:
            raise InputError(f"{name} has a NUL character, which no name and no query has")
        return given

    def number(self, name: str, default: int | None = None, *, least: int = 0, most: int = LARGEST) -> int | None:
        """Return a whole number between `least` and `most`, or the default when it isn't given."""
        given = self.path.get(name) or self.parameters.get(name)
        if not given:
            return default
        if not given.removeprefix("-").isdecimal() or not given.isascii() or len(given) > len(str(LARGEST)) + 1:
            raise InputError(f"{name} must be a whole number, not {given!r:.100}")
        if not least <= (value := int(given)) <= most:
            raise InputError(f"{name} must be from {least:,} to {most:,}, not {value:,}")
        return value

    def choice(self, name: str, among: tuple[str, ...]) -> str:
        """Return one of these, the first when it isn't given."""
        given = self.text(name) or among[0]
        if given not in among:
            raise InputError(f"{name} must be one of {', '.join(among)}, not {given!r:.100}")
        return given

    def link(self, path: str = "", **changes: object) -> str:
        """Return a URL with these parameters changed; those that become None are left out.

        Another page is in an order of its own, and begins at its beginning.
        """
        kept = {name: one for name, one in self.parameters.items() if not path or name not in _OF_A_TABLE}
        return self._url(path, {**kept, **changes})

    def same(self, path: str) -> str:
        """Return the URL of the same as a file."""
        return self._url(path, self.parameters)

    def _url(self, path: str, parameters: Mapping[str, object]) -> str:
        query = urlencode({name: one for name, one in parameters.items() if one not in (None, "")}, errors="replace")
        return f"{path}?{query}" if query else path or "?"


class NotThereError(InputError):
    """There is nothing of this number: it was taken, deleted or forgotten, or never was."""
