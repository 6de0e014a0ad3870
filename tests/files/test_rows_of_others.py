"""Rows of others: which of them are a group, what their columns mean, and what is warned about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig, Status
from replaybuf.errors import FileError, ReplayBufError
from replaybuf.files.sources import RolloutFile
from tests.files.conftest import GOOD, contents

ROOT = Path(__file__).parents[2]


@pytest.mark.fast
async def test_marks_of_other_systems_are_no_error(memory: Any, tmp_path: Path) -> None:
    line = json.dumps(GOOD).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line)
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert (await memory.import_from(tmp_path / "a.jsonl")).rollouts == 2
    assert (await memory.import_from(tmp_path / "empty.jsonl")).groups == 0


# Rows of others


async def test_rows_of_others_are_groups_by_their_id_or_prompt(memory: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "a", "completion": "1", "score": 1, "source": "gsm8k"},
        {"question": "a", "completion": "2", "score": 0},
        {"question": "b", "completion": "3", "score": 0.5, "completion_ids": [1, 2]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    await memory.import_from(tmp_path / "a.jsonl", as_task="math")
    first, second = [group for _, group in await contents(memory)]
    assert [(rollout.response, rollout.reward) for rollout in first] == [("1", 1), ("2", 0)]
    assert first[0].message == [{"role": "user", "content": "a"}]
    assert first[0].extra_fields == {"source": "gsm8k"}
    assert (second[0].response_ids, second[0].status) == ([1, 2], Status.COMPLETED)


CALL = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "4"}]
ANSWER = {"role": "assistant", "content": [{"type": "output_text", "text": "It is "}, {"type": "text", "text": "4"}]}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("completion", [*CALL, ANSWER]),  # verifiers
        ("response", {"id": "r", "output": [{"type": "reasoning"}, {"type": "message", **ANSWER}]}),  # NeMo Gym
        ("output", {"choices": [{"message": {"role": "assistant", "content": "It is 4"}}]}),
        ("completion", {"role": "assistant", "content": "It is 4"}),
    ],
)
async def test_a_response_may_be_messages_which_are_kept(memory: Any, tmp_path: Path, column: str, value: Any) -> None:
    row = {"prompt": [{"role": "user", "content": "2 + 2?"}], column: value, "reward": 1.0, "task": "math"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    await memory.import_from(tmp_path / "a.jsonl")
    [(_, [rollout])] = await contents(memory)
    assert (rollout.response, rollout.status) == ("It is 4", Status.COMPLETED)
    assert rollout.extra_fields == {"response_messages": value}


@pytest.mark.fast
def test_an_error_names_the_file_s_own_column(tmp_path: Path) -> None:
    for column, value, message in (
        ("completion", [{"role": "user", "content": "2"}], "completion is .*; expected a text, or messages"),
        ("completion", 5, r"completion \(read as response\) is 5; expected a text, or messages"),
        ("score", "good", r"score \(read as reward\) is 'good'; expected a finite number"),
    ):
        (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "task": "math", column: value}))
        with pytest.raises(FileError, match=message):
            list(RolloutFile(str(tmp_path / "a.jsonl")).read())


@pytest.mark.fast
@pytest.mark.parametrize("prompt", ["", [], [{"role": "user", "content": ""}], None])
def test_rows_with_an_empty_prompt_are_no_group_of_each_other(tmp_path: Path, prompt: Any) -> None:
    rows = [{"prompt": prompt, "completion": "x", "task": "math", "example_id": n} for n in range(15)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    groups = list(RolloutFile(str(tmp_path / "a.jsonl")).read())
    assert len(groups) == 15
    assert any("each is a group by itself" in notice for notice in groups[0].notices)


async def test_columns_may_be_named(tmp_path: Path) -> None:
    rows = [{"q": "a", "a": "1", "id": n, "note": "x"} for n in range(2)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config: ReplayBufferConfig[Any] = ReplayBufferConfig(url="memory://", rollout_type=dict)
    async with config.build() as buffer:
        settings = {"fields": {"message": "q", "response": "a"}, "key": "id", "as_task": "math", "as_they_are": True}
        await buffer.import_from(tmp_path / "a.jsonl", **settings)
        [(fields_of_group, [first, _])] = await contents(buffer)
        with pytest.raises(FileError, match="line 1 has no field 'z'"):
            await buffer.import_from(tmp_path / "a.jsonl", fields={"response": "z"}, as_task="math")
        summary = await buffer.import_from(tmp_path / "a.jsonl", fields={"mine": "a"}, as_task="math", dry_run=True)
        assert summary.groups == 0
    assert (fields_of_group["key"], first["response"], first["note"]) == ("0", "1", "x")


@pytest.mark.fast
@pytest.mark.parametrize("by", ["group_id", "prompt"])
async def test_rows_of_a_group_that_do_not_follow_each_other_are_noticed(memory: Any, tmp_path: Path, by: str) -> None:
    rows = [{"prompt": "a", "completion": "1", "task": "math", by: str(n)} for n in (1, 2, 1, 3, 1, 1, 2)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = (await memory.import_from(tmp_path / "a.jsonl")).found
    assert [n for notice, n in found.notices.items() if "don't follow" in notice] == [3]
    assert found.groups.total() == 6


async def test_a_reward_that_is_a_number_stays_one(tmp_path: Path) -> None:
    """Whatever `reward_key` says, which is about dicts."""
    rows = [{"prompt": "a", "completion": "1", "task": "math", "reward": reward} for reward in (1, 0.5)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config: ReplayBufferConfig[Any] = ReplayBufferConfig(url="memory://", rollout_type=dict, reward_key="total")
    async with config.build() as buffer:
        await buffer.import_from(tmp_path / "a.jsonl")
        [(group, rollouts)] = await contents(buffer)
    assert (group["reward"], [one["reward"] for one in rollouts]) == (0.75, [1, 0.5])


async def test_a_column_is_the_key_only_if_it_is_named(memory: Any, tmp_path: Path) -> None:
    """Groups that share a value of it would replace each other."""
    rows = [{"prompt": str(n), "completion": "1", "task": "math", "key": "gsm8k"} for n in range(2)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert (await memory.import_from(tmp_path / "a.jsonl")).groups == len(memory) == 2
    assert [(group["key"], one.extra_fields) for group, [one] in await contents(memory)] == [
        (None, {"key": "gsm8k"}),
        (None, {"key": "gsm8k"}),
    ]


async def test_tags_are_the_group_s_only_if_they_are_a_dict(memory: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "tags": {"level": 1}}, {"prompt": "b", "tags": ["algebra"]}, {"prompt": "c", "tags": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    await memory.import_from(tmp_path / "a.jsonl", as_task="math")
    assert [(group["tags"], one.extra_fields) for group, [one] in await contents(memory)] == [
        ({"level": 1}, {}),
        (None, {"tags": ["algebra"]}),
        (None, {}),
    ]


ANSWERS = [{"question": str(n), "answer": str(2 * n), "grade": 1} for n in range(5)]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "unanswered"), [({}, 5), ({"fields": {"response": "answer"}}, 0), ({"as_status": "init"}, 0)]
)
async def test_groups_without_a_response_are_noticed_unless_it_was_meant(
    memory: Any, options: dict[str, Any], unanswered: int, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ANSWERS)))
    contents_of_file = (await memory.import_from(tmp_path / "a.jsonl", as_task="math", dry_run=True, **options)).found
    assert sum(n for notice, n in contents_of_file.notices.items() if "without a response" in notice) == unanswered


@pytest.mark.fast
@pytest.mark.parametrize("where", ["fields", "key"])
@pytest.mark.parametrize("url", ["postgresql://me:hunter2@db/rl", "postgresql://db/rl?password=hunter2"])
async def test_a_url_in_place_of_a_columns_name_keeps_its_password(
    memory: Any, tmp_path: Path, where: str, url: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    for mapping in [url] if where == "key" else [{"response": url}, {url: "z"}]:
        with pytest.raises(ReplayBufError, match=r"(has|is) no field") as caught:
            await memory.import_from(tmp_path / "a.jsonl", **{where: mapping})
        assert "hunter2" not in str(caught.value)


async def test_parquet_of_others_with_its_own_types(memory: Any, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table(
        {
            "prompt": pa.array([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]),
            "completion": pa.array(["1", "2"], pa.large_string()),
            "task": pa.array(["math", "math"]).dictionary_encode(),
            "response_ids": pa.array([[1, 2], None], pa.large_list(pa.int32())),
            "nested": pa.array([[[1], []], [[2, 3]]]),
            "when": pa.array([0, 1], pa.timestamp("us", "UTC")),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    await memory.import_from(tmp_path / "a.parquet")
    first, second = [group[0] for _, group in await contents(memory)]
    assert (first.response, first.response_ids, second.response_ids) == ("1", [1, 2], None)
    assert first.extra_fields["nested"] == [[1], []]
