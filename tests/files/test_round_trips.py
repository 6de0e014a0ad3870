"""What is exported exactly comes back as it was; any other export has plain values, for people and programs."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from replaybuf import ReplayBuffer, ReplayBufferConfig, Status
from replaybuf.cli.commands import app
from replaybuf.files import exporting
from replaybuf.files.row_format import plain
from replaybuf.values.rollouts.rollout_type import OUR_FIELDS
from tests.codec.values import Bits, Color, Level, Name, same, values
from tests.files.conftest import contents, fill

# Fields of any name and value: none of them means anything to the buffer.
_UNUSED = dict.fromkeys(OUR_FIELDS)
FORMATS = ("a.jsonl", "a.parquet")
_SIMPLE = (
    st.binary()
    | st.lists(st.integers(-(2**63), 2**63) | st.floats(), max_size=3)
    | st.lists(st.text(max_size=2), max_size=3)
    | st.lists(st.fixed_dictionaries({"role": st.text(max_size=2), "content": st.text(max_size=2)}), max_size=2)
)


def buffer_of_dicts(url: str = "memory://", **options: Any) -> ReplayBuffer[Any]:
    return ReplayBufferConfig(url=url, rollout_type=dict, **({"fields": _UNUSED} | options)).build()


_NAMES = st.sampled_from(["response_ids", "x", "$x", "group.x", "rollouts", "task_name", "message", "ü"]) | st.text(
    max_size=3
)


@pytest.mark.parametrize("name", FORMATS)
async def test_an_import_of_an_export_gives_the_same_groups(url: str, tmp_path: Path, name: str) -> None:
    async with ReplayBufferConfig(url=url, max_times_sampled=3).build() as buffer:
        await fill(buffer)
        await buffer.sample({"math": 1})
        stats = await buffer.export(tmp_path / name, exact=True)
        assert (stats.groups, stats.rollouts, stats.bytes) == (5, 10, (tmp_path / name).stat().st_size)
        before = await contents(buffer)
    async with ReplayBufferConfig(url="memory://").build() as other:
        await other.import_from(tmp_path / name)
        after = await contents(other)
    assert [row for row, _ in after] == [row for row, _ in before]
    assert same(_fields(after), _fields(before))


def _sorted(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rollouts with their fields in one order, which files don't keep."""
    return [dict(sorted(rollout.items())) for rollout in group]


def _fields(groups: list[tuple[Any, list[Any]]]) -> list[list[dict[str, Any]]]:
    return [[vars(rollout) for rollout in group] for _, group in groups]


@pytest.mark.fast
@settings(max_examples=12, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.dictionaries(_NAMES, values | _SIMPLE, max_size=4), min_size=1, max_size=3), max_size=4
    ),
    name=st.sampled_from(FORMATS),
)
@example([[{"objects": np.array([{"a": "x"}, {"a": "y"}], object)}]], "a.parquet")
def test_every_value_that_can_be_stored_comes_back(groups: list[list[dict[str, Any]]], name: str) -> None:
    types = [Color, Level, Name, Bits]

    async def go(path: Path) -> None:
        async with buffer_of_dicts(types=types) as buffer, buffer_of_dicts(types=types) as other:
            for group in groups:
                await buffer.put(group, "task", status="completed")
            before = [_sorted(item.item) async for item in buffer.find({})]
            await buffer.export(path, exact=True)
            await other.import_from(path)
            assert same([_sorted(item.item) async for item in other.find({})], before)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(go(Path(folder) / name))


class Judge(Enum):
    RULE = "rule"


#: Values, as they are in JSON, and as Arrow's.
PLAIN: dict[str, tuple[Any, Any, Any]] = {
    "ids": (np.arange(3, dtype=np.int32), [0, 1, 2], "list<element: int32>"),
    "experts": (np.arange(4, dtype=np.uint8).reshape(2, 2), [[0, 1], [2, 3]], "list<element: list<element: uint8>>"),
    "half": (np.array([0.5], np.float16), [0.5], "list<element: float>"),
    "mixed": ([1, 0.5], [1, 0.5], "list<element: double>"),
    "message": ([{"role": "user", "content": "a"}], [{"role": "user", "content": "a"}], None),
    "reward": ({"score": 0.5}, {"score": 0.5}, "string"),
    "pair": ((1, "a"), [1, "a"], "string"),
    "judge": (Judge.RULE, "rule", "string"),
    "raw": (b"hi", "aGk=", "binary"),
    "logprobs": ([0.5, -math.inf], [0.5, "-inf"], "list<element: double>"),
    "when": (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00", "string"),
    "numbers": ({1: "a"}, {"1": "a"}, "string"),
}


@pytest.mark.fast
async def test_values_are_plain(tmp_path: Path) -> None:
    async with buffer_of_dicts(types=[Judge]) as buffer:
        for _ in range(2):
            await buffer.put([{name: value for name, (value, _, _) in PLAIN.items()}], "task", status="completed")
        await buffer.export(tmp_path / "a.jsonl")
        await buffer.export(tmp_path / "a.parquet")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    expected = {name: text for name, (_, text, _) in PLAIN.items()}
    assert [{name: row[name] for name in PLAIN} for row in lines] == [expected] * 2
    assert not any(name.endswith("payload") for name in lines[0])
    schema = pytest.importorskip("pyarrow.parquet").read_schema(tmp_path / "a.parquet")
    assert {name: str(schema.field(name).type) for name, case in PLAIN.items() if case[2]} == {
        name: case[2] for name, case in PLAIN.items() if case[2]
    }
    assert str(schema.field("message").type) == "list<element: struct<role: string, content: string>>"


@pytest.mark.fast
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
async def test_values_that_fit_no_column_are_in_more_and_plain_exports_are_imported(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_GROUPS_AT_ONCE", 1)
    first = {"x": 1, "y": 0.5, "text": "a", "objects": [{}], "reward": {"score": 1.0}, "rollouts": [], "tags": "b"}
    unfit = {"x": "a", "y": 2**60 + 1, "text": "\ud800", "reward": None, "z": (1,), "group.uid": 5, "rollouts": [2]}
    async with buffer_of_dicts() as buffer, buffer_of_dicts() as other:
        for rollout in (first, unfit):
            await buffer.put([rollout], "task", status="completed")
        await buffer.export(tmp_path / name)
        await other.import_from(tmp_path / name)
        imported = [item.item[0] async for item in other.find({})]
    without_none = {key: value for key, value in imported[1].items() if value is not None}
    assert (imported[0], without_none) == (first, {**{k: v for k, v in unfit.items() if v is not None}, "z": [1]})


async def test_the_command_exports_classes_that_it_does_not_know(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    async with buffer_of_dicts(url, types=[Judge]) as buffer:
        await buffer.put([{"judge": Judge.RULE}], "task", status="completed")
    command = ["export", url, str(tmp_path / "a.jsonl")]
    assert (await asyncio.to_thread(CliRunner().invoke, app, command)).exit_code == 0
    assert json.loads((tmp_path / "a.jsonl").read_text())["judge"] == "rule"


async def test_an_exact_export_has_rollouts_as_a_refresh_left_them(url: str, tmp_path: Path) -> None:
    async with ReplayBufferConfig(url=url).build() as buffer, ReplayBufferConfig(url="memory://").build() as other:
        await fill(buffer)
        await buffer.refresh_staleness(task_stale_thresholds={"math": 5, "code": 50}, current_train_step=20)
        await buffer.export(tmp_path / "a.jsonl", exact=True)
        await other.import_from(tmp_path / "a.jsonl")
        before, after = await contents(buffer), await contents(other)
    assert [row for row, _ in after] == [row for row, _ in before]
    assert same(_fields(after), _fields(before))
    assert {rollout.status for _, group in after for rollout in group} == {Status.COMPLETED, Status.EXPIRED}


def test_a_value_whose_text_cannot_be_had_is_its_type() -> None:
    class Unwritable:
        def __str__(self) -> str:
            raise ValueError

    assert plain([Unwritable()]) == ["Unwritable"]


@pytest.mark.torch
async def test_tensors_survive_an_export(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    rollout = {"logprobs": torch.tensor([0.1, -2]).bfloat16(), "ids": torch.arange(3), "image": torch.rand(2, 3)}
    for name in ("a.jsonl", "a.parquet"):
        async with buffer_of_dicts(fields={}) as buffer, buffer_of_dicts(fields={}) as other:
            await buffer.put([dict(rollout)], "math", status="completed")
            await buffer.export(tmp_path / name, exact=True)
            await other.import_from(tmp_path / name)
            [(_, [copy])] = await contents(other)
        assert all(copy[key].dtype == rollout[key].dtype and torch.equal(copy[key], rollout[key]) for key in rollout)
