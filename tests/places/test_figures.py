"""What is said of payloads that are kept apart: the view `places`, the command `stats`, the metrics, the page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families as parse

from replaybuf import ReplayBuffer, RolloutState
from replaybuf.storage.places.store import FILES
from tests.cli.conftest import run, run_json
from tests.observe.test_exposition import numbers
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


def test_the_command_and_the_page_list_arrays_and_where_they_are(shared_url: str, tmp_path: Path) -> None:
    """Of groups that are kept apart and of others, also while the folder isn't there."""
    folder = tmp_path / "payloads"

    async def fill() -> None:
        async with apart(shared_url, folder) as buffer:
            for columns in (2, 2000):
                [rollout] = group(columns)
                rollout.extra_fields = {"images": [np.zeros((12, columns), np.float32), np.arange(3)]}
                rollout.routed_experts = np.asfortranarray(np.zeros((3, 4), np.int8))
                await buffer.put([rollout], TASK)

    asyncio.run(fill())
    folder.rename(tmp_path / "away")
    small, large = (run_json("show", shared_url, uid, "--full")["arrays"] for uid in (1, 2))
    expected = {
        "rollout": 0, "name": "extra_fields.images[0]", "dtype": "float32", "nbytes": 96, "shape": [12, 2],
        "where": "the database",
    }  # fmt: skip
    assert [one["name"] for one in small] == ["routed_experts", "extra_fields.images[0]", "extra_fields.images[1]"]
    assert small[1] == expected
    assert [one["where"] for one in (large[0], large[2])] == ["the database"] * 2
    file = Path(large[1]["where"])
    assert (tmp_path / "away").joinpath(*file.parts[-2:]).stat().st_size == 96_000
    assert large[1] == {**expected, "nbytes": 96_000, "shape": [12, 2000], "where": str(file)}
    shown = run("show", shared_url, 2, "--full")
    assert f"extra_fields.images[0]  float32  12 × 2000  96.0 kB  {file.name}" in shown.stdout
    assert f"{file.name}: in {file.parent}\n2 small arrays of 36 B: in the database\n" in shown.stdout
    assert "is shown without its arrays" in shown.stderr
    page = client_of(shared_url).get("/groups/2").text
    assert re.search(r"<td[^>]*>12 × 2000</td>\s*<td[^>]*>96.0 kB</td>", page)
    assert f"{file.name}: in {file.parent}" in page
    assert "3 small arrays" in client_of(shared_url).get("/groups/1").text
