"""What is said of payloads that are kept apart: the view `places`, the command `stats`, the metrics, the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families as parse

from replaybuf import ReplayBuffer, RolloutState
from replaybuf.storage.places.store import FILES
from tests.cli.conftest import run, run_json
from tests.observe.test_spans import numbers
from tests.stores import TASK, build, group, opened, sweep_now
from tests.web.conftest import client_of

#: The bytes of the arrays of a group.
EACH = 100_000


def heavy(number: int) -> list[RolloutState]:
    [rollout] = group(number)
    rollout.extra_fields = {"pixels": np.arange(EACH, dtype=np.uint8)}
    return [rollout]


@asynccontextmanager
async def apart(url: str, folder: Path, groups: int = 0) -> AsyncIterator[ReplayBuffer]:
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240
    async with build(url, payloads=str(folder), payload_threshold=20_000) as buffer:
        for number in range(groups):
            await buffer.put(heavy(number), TASK)
        yield buffer


def place(url: str) -> dict[str, Any]:
    """The one row of the view."""
    [row] = run_json("sql", url, "SELECT * FROM places")
    return dict(row)


async def fill(url: str, folder: Path, groups: int) -> None:
    async with apart(url, folder, groups):
        pass


async def take(url: str) -> None:
    """Take a group, and let it be swept at once."""
    async with build(url) as buffer:
        await buffer.get(1, TASK)
        await buffer.storage._write(sweep_now)


def test_the_view_adds_up(shared_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "payloads"
    asyncio.run(fill(shared_url, folder, 4))
    size = sum(file.stat().st_size for file in (folder / FILES).iterdir())
    # The last tail of a file is padded, which isn't counted.
    assert place(shared_url) == {"url": str(folder), "files": 4, "groups": 4, "bytes": 4 * EACH}
    assert 4 * EACH <= size < 4 * EACH + 256
    asyncio.run(take(shared_url))
    assert place(shared_url)["groups"] == 3


def test_stats_metrics_and_the_page_say_the_same(shared_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "payloads"
    asyncio.run(fill(shared_url, folder, 2))
    row = place(shared_url)
    assert run_json("stats", shared_url)["database"]["places"] == {row.pop("url"): row}
    [line] = [line for line in run("stats", shared_url).stdout.splitlines() if line.startswith("payloads in")]
    assert line == f"payloads in {folder}: 200 kB of 2 groups, 2 files"
    found = numbers(parse(run("stats", shared_url, "--format=prometheus").stdout))
    labels = (("place", str(folder)),)
    assert found["replaybuf_payload_files", labels] == row["files"]
    assert found["replaybuf_payload_file_bytes", labels] == row["bytes"]
    assert found["replaybuf_payload_file_groups", labels] == row["groups"]
    client = client_of(shared_url)
    page = client.get("/").text
    assert f'<dt title="{folder}">payloads apart</dt><dd>200 kB' in page


def test_a_database_that_keeps_all_has_no_places(shared_url: str) -> None:
    with opened(shared_url) as buffer:
        asyncio.run(buffer.put(group(1), TASK))
    assert run_json("sql", shared_url, "SELECT * FROM places") == []
    assert "payloads in" not in run("stats", shared_url).stdout
    assert "payloads apart" not in client_of(shared_url).get("/").text
    assert "replaybuf_payload_file" not in run("stats", shared_url, "--format=prometheus").stdout
