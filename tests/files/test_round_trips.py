"""What is exported comes back as it was: every value, the metadata, and the order."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaybuf import ReplayBufferConfig
from replaybuf.rollouts.rollout_type import OUR_FIELDS
from tests.codec.values import Bits, Color, Level, Name, same, values
from tests.files.stores import contents, fill

# Fields of any name and value: none of them means anything to the buffer.
_UNUSED = dict.fromkeys(OUR_FIELDS)
FORMATS = ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.arrows")
_SIMPLE = (
    st.binary()
    | st.lists(st.integers(-(2**63), 2**63) | st.floats(), max_size=3)
    | st.lists(st.text(max_size=2), max_size=3)
    | st.lists(st.fixed_dictionaries({"role": st.text(max_size=2), "content": st.text(max_size=2)}), max_size=2)
)
_NAMES = st.sampled_from(["response_ids", "x", "$x", "group.x", "rollouts", "task_name", "message", "ü"]) | st.text(
    max_size=3
)


@pytest.mark.parametrize("rows", ["rollouts", "groups"])
@pytest.mark.parametrize("name", FORMATS)
async def test_an_import_of_an_export_gives_the_same_groups(url: str, tmp_path: Path, name: str, rows: Any) -> None:
    async with ReplayBufferConfig(url=url, max_times_sampled=3).build() as buffer:
        await fill(buffer)
        await buffer.sample({"math": 1})
        done = await buffer.export(tmp_path / name, rows=rows)
        assert (done.groups, done.rollouts, done.left, done.files) == (5, 10, 0, [tmp_path / name])
        before = await contents(buffer)
    async with ReplayBufferConfig(url="memory://").build() as other:
        await other.import_from(tmp_path / name)
        after = await contents(other)
    assert [one for one, _ in after] == [one for one, _ in before]
    assert same(_fields(after), _fields(before))


def _sorted(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rollouts with their fields in one order, which files don't keep."""
    return [dict(sorted(rollout.items())) for rollout in group]


def _fields(groups: list[tuple[Any, list[Any]]]) -> list[list[dict[str, Any]]]:
    return [[vars(rollout) for rollout in group] for _, group in groups]


@pytest.mark.fast
@pytest.mark.parametrize("rows", ["rollouts", "groups"])
@pytest.mark.parametrize("name", FORMATS)
async def test_half_surrogate_pairs_come_back_wherever_they_are(tmp_path: Path, name: str, rows: Any) -> None:
    plain = {"x": "a", "message": [{"role": "user"}], "texts": ["a"]}
    odd = {"x": "\ud800", "message": [{"\ud83d": "user"}], "texts": ["\udfff"], "\udc00": 1}
    config: ReplayBufferConfig[Any] = ReplayBufferConfig(url="memory://", rollout_type=dict, fields=_UNUSED)
    async with config.build() as buffer, config.build() as other:
        for group in ([odd], [plain], [odd]):
            await buffer.put(group, "task", status="completed")
        await buffer.export(tmp_path / name, rows=rows)
        await other.import_from(tmp_path / name)
        assert [item.item async for item in other.find({})] == [[odd], [plain], [odd]]


@pytest.mark.fast
@settings(max_examples=25, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.dictionaries(_NAMES, values | _SIMPLE, max_size=4), min_size=1, max_size=3), max_size=4
    ),
    name=st.sampled_from(FORMATS),
    rows=st.sampled_from(["rollouts", "groups"]),
)
def test_every_value_that_can_be_stored_comes_back(groups: list[list[dict[str, Any]]], name: str, rows: Any) -> None:
    config: ReplayBufferConfig[Any] = ReplayBufferConfig(
        url="memory://", rollout_type=dict, types=[Color, Level, Name, Bits], fields=_UNUSED
    )

    async def go(path: Path) -> None:
        async with config.build() as buffer, config.build() as other:
            for group in groups:
                await buffer.put(group, "task", status="completed")
            before = [_sorted(item.item) async for item in buffer.find({})]
            await buffer.export(path, rows=rows)
            await other.import_from(path)
            assert same([_sorted(item.item) async for item in other.find({})], before)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(go(Path(folder) / name))
