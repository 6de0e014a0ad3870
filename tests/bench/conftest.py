"""Loads that take seconds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from replaybuf.cli.bench import run as parent
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.cli.conftest import run


@pytest.fixture(autouse=True)
def _forked_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests of this process share one process to fork from; and no variable is taken for an option."""
    monkeypatch.setattr(parent, "PRELOADED", ["tests.faults.preloaded"])
    for name in [name for name in os.environ if name.startswith("REPLAYBUF_") and "TEST" not in name]:
        monkeypatch.delenv(name)


def bench(url: str, *options: object, code: int | None = 0) -> Any:
    """The results of a small load: 20 groups of each of two workers, unless options say otherwise."""
    small = ("--workers", 2, "--trainers", 1, "--group", "2x16", "--take", 4, "--groups", 20, "--minutes", 2)
    return json.loads(run("bench", url, *small, *options, "--format=json", code=code).stdout)


def left_behind(url: str) -> dict[str, int]:
    """The number of rows that there are in tables of groups and buffers, where there are any."""
    if url.startswith("sqlite") and not Path(url.removeprefix("sqlite:///")).exists():
        return {}
    tables = (
        "group",
        "payload",
        "past",
        "lane",
        "tally",
        "worker",
        "batch",
        "event",
        "history",
    )
    counts = {
        table: open_reader(url).read(lambda tx, table=table: tx.value(f"SELECT count(*) FROM rb_{table}"))  # type: ignore[misc]
        for table in tables
    }
    return {table: count for table, count in counts.items() if count}
