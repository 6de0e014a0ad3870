"""Databases to observe, and their metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.cli.conftest import _no_variables as _no_variables
from tests.cli.conftest import busy as busy
from tests.cli.conftest import empty as empty
from tests.cli.conftest import filled as filled


def numbers(families: Iterable[Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the numbers by series and labels, of which no two are the same."""
    samples = [sample for family in families for sample in family.samples]
    values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(values) == len(samples)
    return values
