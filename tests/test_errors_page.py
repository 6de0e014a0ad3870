"""Every error that users may meet is on docs/outages.md, where they look for it, and in `replaybuf.errors`."""

from __future__ import annotations

import builtins
import re

import pytest

from replaybuf import errors
from replaybuf.errors import StorageError
from replaybuf.storage.sql.engine import outage, postgres  # noqa: F401 (all modules that define more errors)
from tests.pages import DOCS

pytestmark = pytest.mark.fast

PAGE = (DOCS / "outages.md").read_text("utf-8")
#: What can't leave the call that handles it.
_INSIDE = {"NoPasswordError"}


def below(kind: type[Exception]) -> dict[str, type[Exception]]:
    """All subclasses of replaybuf that were imported, by name."""
    found = {one.__name__: one for one in kind.__subclasses__() if one.__module__.startswith("replaybuf.")}
    return found | {name: one for each in found.values() for name, one in below(each).items()}


def rows() -> dict[str, list[str]]:
    """What the page says that a class also is."""
    table = PAGE.partition("## StorageError")[2].partition("\n\n## ")[0]
    cells = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    return {name: re.findall(r"`(\w+)`", also) for names, _, also in cells for name in re.findall(r"`(\w+)`", names)}


def test_every_error_of_the_storage_is_on_the_page() -> None:
    assert set(rows()) == set(below(StorageError)) - _INSIDE


def test_the_page_says_what_else_each_is() -> None:
    known = below(StorageError) | vars(errors) | vars(builtins)
    for name, others in rows().items():
        assert [other for other in others if not issubclass(known[name], known[other])] == [], name


def test_errors_are_of_one_module_but_for_those_with_a_question_of_their_own() -> None:
    elsewhere = {name for name, one in below(StorageError).items() if one.__module__ != errors.__name__}
    assert elsewhere - _INSIDE == {"OutcomeUnknownError", "NotReplicatedError"}
