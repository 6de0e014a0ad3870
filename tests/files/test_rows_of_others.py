"""Rows of others: which of them are a group, and what their columns mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig, Status
from replaybuf.errors import FileError, ReplayBufError
from replaybuf.files.sources import RolloutFile
from tests.files.conftest import GOOD, contents

ANSWER = {"fields": {"message": "prompt", "response": "completion"}, "as_task": "math"}


async def test_rows_of_others_are_groups_by_their_id_or_prompt(memory: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "completion": "1", "reward": 1, "source": "gsm8k"},
        {"prompt": "a", "completion": "2", "reward": 0},
        {"prompt": "b", "completion": "3", "reward": 0.5, "response_ids": [1, 2]},
        *({"prompt": str(n), "completion": "4", "group_id": 7} for n in range(2)),
    ]
    (tmp_path / "a.jsonl").write_text("\r\n\r\n".join(map(json.dumps, rows)))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    await memory.import_from(tmp_path / "a.jsonl", **ANSWER)
    assert (await memory.import_from(tmp_path / "empty.jsonl")).groups == 0
    first, second, third = [group for _, group in await contents(memory)]
    assert [(rollout.response, rollout.reward) for rollout in first] == [("1", 1), ("2", 0)]
    assert first[0].message == [{"role": "user", "content": "a"}]
    assert first[0].extra_fields == {"source": "gsm8k"}
    assert (second[0].response_ids, second[0].status) == ([1, 2], Status.COMPLETED)
    assert [rollout.response for rollout in third] == ["4", "4"]


async def test_rows_may_have_token_ids_alone(memory: Any, tmp_path: Path) -> None:
    rows = [{"prompt_ids": [n], "response_ids": [2, 3], "reward": 1} for n in (1, 1, 5)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    await memory.import_from(tmp_path / "a.jsonl", as_task="math")
    groups = [group for _, group in await contents(memory)]
    assert [[one.prompt_ids for one in group] for group in groups] == [[[1], [1]], [[5]]]
    assert (groups[1][0].message, groups[1][0].status) == ([], Status.COMPLETED)


@pytest.mark.fast
@pytest.mark.parametrize("prompt", ["", []])
def test_rows_with_an_empty_prompt_are_no_group_of_each_other(tmp_path: Path, prompt: Any) -> None:
    rows = [{"message": prompt, "response": "x", "task_name": "math"} for _ in range(15)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(list(RolloutFile(tmp_path / "a.jsonl").read())) == 15


async def test_columns_may_be_named(tmp_path: Path) -> None:
    """Of dicts, the others are fields of their names."""
    rows = [{"q": "a", "a": "1", "note": "x"} for _ in range(2)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config: ReplayBufferConfig[Any] = ReplayBufferConfig(url="memory://", rollout_type=dict)
    async with config.build() as buffer:
        await buffer.import_from(tmp_path / "a.jsonl", fields={"message": "q", "response": "a"}, as_task="math")
        [(_, [first, _])] = await contents(buffer)
        with pytest.raises(FileError, match="line 1 has no field 'z'"):
            await buffer.import_from(tmp_path / "a.jsonl", fields={"response": "z"}, as_task="math")
    assert (first["response"], first["note"]) == ("1", "x")


async def test_rollouts_without_a_response_are_imported_with_a_status(memory: Any, tmp_path: Path) -> None:
    """Dicts also without a prompt."""
    (tmp_path / "prompt.jsonl").write_text(json.dumps({"message": "1 + 1?"}))
    await memory.import_from(tmp_path / "prompt.jsonl", as_task="math", as_status="init")
    assert await memory.count("math", Status.INIT) == 1
    (tmp_path / "steps.jsonl").write_text('{"steps": [1]}\n{"steps": [2]}\n')
    async with ReplayBufferConfig(url="memory://", rollout_type=dict).build() as buffer:
        await buffer.import_from(tmp_path / "steps.jsonl", as_task="math", as_status="completed")
        assert [group[0]["steps"] for _, group in await contents(buffer)] == [[1], [2]]


async def test_a_reward_that_is_a_number_stays_one(tmp_path: Path) -> None:
    """Whatever `reward_key` says, which is about dicts."""
    rows = [{"message": "a", "response": "1", "task_name": "math", "reward": reward} for reward in (1, 0.5)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config: ReplayBufferConfig[Any] = ReplayBufferConfig(url="memory://", rollout_type=dict, reward_key="total")
    async with config.build() as buffer:
        await buffer.import_from(tmp_path / "a.jsonl")
        [(group, rollouts)] = await contents(buffer)
    assert (group["reward"], [one["reward"] for one in rollouts]) == (0.75, [1, 0.5])


async def test_tags_are_the_group_s_only_if_they_are_a_dict(memory: Any, tmp_path: Path) -> None:
    rows = [{"message": str(tags), "response": "1", "tags": tags} for tags in ({"level": 1}, ["algebra"], None)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    await memory.import_from(tmp_path / "a.jsonl", as_task="math")
    assert [(group["tags"], one.extra_fields) for group, [one] in await contents(memory)] == [
        ({"level": 1}, {}),
        (None, {"tags": ["algebra"]}),
        (None, {}),
    ]


@pytest.mark.fast
@pytest.mark.parametrize("url", ["postgresql://me:hunter2@db/rl", "postgresql://db/rl?password=hunter2"])
async def test_a_url_in_place_of_a_columns_name_keeps_its_password(memory: Any, tmp_path: Path, url: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    for mapping in ({"response": url}, {url: "z"}):
        with pytest.raises(ReplayBufError, match=r"(has|is) no field") as caught:
            await memory.import_from(tmp_path / "a.jsonl", fields=mapping)
        assert "hunter2" not in str(caught.value)


async def test_parquet_of_others_with_its_own_types(memory: Any, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table(
        {
            "prompt": pa.array([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]),
            "completion": pa.array(["1", "2"], pa.large_string()),
            "task_name": pa.array(["math", "math"]).dictionary_encode(),
            "response_ids": pa.array([[1, 2], None], pa.large_list(pa.int32())),
            "nested": pa.array([[[1], []], [[2, 3]]]),
            "when": pa.array([0, 1], pa.timestamp("us", "UTC")),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    await memory.import_from(tmp_path / "a.parquet", fields=ANSWER["fields"])
    first, second = [group[0] for _, group in await contents(memory)]
    assert (first.response, first.response_ids, second.response_ids) == ("1", [1, 2], None)
    assert first.extra_fields["nested"] == [[1], []]
