"""Request parameters, validated, and the URLs that repeat them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from replaybuf.errors import InputError

LARGEST = 2**63 - 1
#: The parameters that pages know. Others are dropped: each link repeats those of its page.
PARAMETERS = frozenset(
    (
        *("after", "all", "before", "buffer", "by", "hours", "kind"),
        *("order", "page", "size", "sort", "status", "task", "where", "worker"),
    )
)


@dataclass(frozen=True, slots=True)
class Ask:
    """The parameters of a URL's query, and the numbers in its path. Accessors raise InputError for invalid values.

    `prefix` is the path of a proxy before the paths of all pages, "/rl" or "".
    """

    parameters: Mapping[str, str]
    path: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""

    def text(self, name: str) -> str | None:
        """Return a parameter's text, or None when it is missing or empty."""
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
        """Return a parameter's value, which must be one of `among`; the default is the first of them."""
        given = self.text(name) or among[0]
        if given not in among:
            raise InputError(f"{name} must be one of {', '.join(among)}, not {given!r:.100}")
        return given

    def link(self, path: str = "", **changes: object) -> str:
        """Return a URL with these parameters; those set to None are left out.

        On this page (without a path) its other parameters are kept, on another one only the buffer.
        """
        kept = {name: one for name, one in self.parameters.items() if not path or name == "buffer"}
        parameters = {**kept, **changes}
        query = urlencode({name: one for name, one in parameters.items() if one not in (None, "")}, errors="replace")
        path = self.prefix + path if path else ""
        return f"{path}?{query}" if query else path or "?"

    def of_worker(self, name: str) -> str:
        """Return the URL of the groups that a worker put, lowest reward first."""
        return self.link("/groups", where=json.dumps({"worker": name}), order="reward")


class NotThereError(InputError):
    """There is nothing of this number: it was taken, deleted or forgotten, or never was."""
