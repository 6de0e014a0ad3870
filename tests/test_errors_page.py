"""Every error that users may meet is on docs/outages.md, where they look for it, and in `replaybuf.errors`."""

from __future__ import annotations

import builtins
import pickle
import re
from collections.abc import Iterator

import pytest

from replaybuf import errors
from replaybuf.errors import StorageError
from replaybuf.storage.sql.engine import outage, postgres  # noqa: F401 (all modules that define more errors)
from tests.pages import DOCS

pytestmark = pytest.mark.fast

PAGE = (DOCS / "outages.md").read_text("utf-8")
#: What users meet as an `UnreachableError`.
_INSIDE = {"NoPasswordError", "OutcomeUnknownError", "CutShortError"}


def below(kind: type[Exception]) -> dict[str, type[Exception]]:
    """All subclasses of replaybuf that were imported, by name."""
    found = {one.__name__: one for one in kind.__subclasses__() if one.__module__.startswith("replaybuf.")}
    return found | {name: one for each in found.values() for name, one in below(each).items()}


def table() -> Iterator[tuple[str, str, list[str]]]:
    """The page's classes, reasons, and what else a class is."""
    name = ""
    for line in PAGE.partition("## StorageError")[2].partition("\n\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0] != "catch" and not cells[0].startswith("-"):
            name = cells[0].strip("`") or name
            yield name, cells[1], re.findall(r"`(\w+)`", cells[3])


def test_every_error_of_the_storage_is_on_the_page_with_its_reasons() -> None:
    kinds = {"StorageError": StorageError} | below(StorageError)
    kinds = {name: one for name, one in kinds.items() if name not in _INSIDE}
    reasons = {(name, reason) for name, one in kinds.items() for reason in vars(one).get("REASONS", ())}
    assert {name for name, _, _ in table()} == set(kinds)
    assert {(name, reason) for name, reason, _ in table() if reason} == reasons


def test_the_page_says_what_else_each_is() -> None:
    known = below(StorageError) | vars(errors) | vars(builtins)
    for name, _, others in table():
        assert [other for other in others if not issubclass(known[name], known[other])] == [], name


def test_errors_are_of_one_module_but_for_those_inside() -> None:
    elsewhere = {name for name, one in below(StorageError).items() if one.__module__ != errors.__name__}
    assert elsewhere <= _INSIDE


def test_a_reason_is_one_of_its_class_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(StorageError(reason="disk full")))
    assert (error.reason, str(error)) == ("disk full", StorageError.REASONS["disk full"])
    with pytest.raises(AssertionError):
        errors.AccessError(reason="disk full")
