"""Tables of completions, and numbers of a batch."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from replaybuf import ReplayBufferConfig, RolloutState, Status, StorageItem
from replaybuf.errors import InputError
from replaybuf.view.metrics import as_markdown, batch_metrics, completions_table

HOSTILE = "<script>alert(1)</script> ![x](http://evil/x.png) & \x1b[31m \x00 \ud800 \u202e"


def item(uid: int, rewards: list[Any], *, task: str = "math", draws: int = 1, **fields: Any) -> StorageItem:
    rollouts = [
        RolloutState(
            message=[{"role": "user", "content": f"{uid}?"}],
            response=f"{uid}.{i}",
            response_ids=np.arange(3 + i),
            reward=reward,
            status=Status.COMPLETED,
            **fields,
        )
        for i, reward in enumerate(rewards)
    ]
    numbers = [reward for reward in rewards if isinstance(reward, float)]
    mean = sum(numbers) / len(numbers) if numbers else None
    return StorageItem(uid, uid, task, Status.COMPLETED, uid % 3, 1.0, draws, 1000.0 + uid, mean, item=rollouts)


def uids(table: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["uid"], row["rollout"]) for row in table]


BATCH = {"math": [item(1, [0.5, 0.0]), item(2, [1.0, None])], "code": [item(3, [0.25, 0.75], task="code", draws=2)]}


def test_a_row_says_what_a_rollout_was() -> None:
    table = completions_table(BATCH, step=7, choose="first", advantages=[0, 1, 2, 3, 4, 5])
    assert table[5] == {
        "step": 7,
        "task": "code",
        "uid": 3,
        "rollout": 1,
        "worker": None,
        "replayed": True,
        "staleness": 0,
        "prompt": "user: 3?",
        "response": "3.1",
        "tokens": 4,
        "finish_reason": None,
        "reward": 0.75,
        "advantage": 5,
    }


@pytest.mark.parametrize(
    ("choose", "rows", "expected"),
    [
        ("first", 3, [(1, 0), (1, 1), (2, 0)]),
        ("extremes", 3, [(2, 0), (3, 1), (1, 1)]),
        ("extremes", 32, [(2, 0), (3, 1), (1, 0), (3, 0), (1, 1)]),
        ("extremes", 0, []),
    ],
)
def test_rows_are_chosen_by_their_rewards(choose: Any, rows: int, expected: list[tuple[int, int]]) -> None:
    assert uids(completions_table(BATCH, rows=rows, choose=choose)) == expected


@pytest.mark.parametrize("choose", ["random", "extremes"])
def test_a_choice_by_chance_is_that_of_the_step(choose: Any) -> None:
    batch = [item(uid, [0.0, 0.0]) for uid in range(100)]
    first, again, other = (uids(completions_table(batch, rows=8, choose=choose, step=step)) for step in (3, 3, 4))
    assert first == again != other


def test_parts_of_rewards_have_columns_of_their_own() -> None:
    table = completions_table([item(1, [{"score": 1.0, "format": 0.5}, {"score": 0.0, "why": "late"}])], choose="first")
    assert [name for name in table[0] if "/" in name] == ["reward/score", "reward/format", "reward/why"]
    first, second = table
    assert (first["reward"], first["reward/format"], first["reward/why"]) == (1.0, 0.5, None)
    assert (second["reward/format"], second["reward/why"]) == (None, "late")


def test_columns_are_bounded() -> None:
    many = item(1, [{f"part {i}": 1.0 for i in range(1000)}])
    assert len(completions_table([many], choose="first")[0]) < 40


def test_texts_are_cut_and_become_json() -> None:
    table = completions_table([item(1, [1.0], finish_reason=HOSTILE)], characters=10)
    assert table[0]["finish_reason"] == HOSTILE[:10] + "…"
    table = completions_table([item(1, [1.0], finish_reason=HOSTILE)])
    assert "\x00" not in json.dumps(table, ensure_ascii=False).encode().decode()


@pytest.mark.parametrize(
    "wrong",
    [
        {"advantages": [1.0]},
        {"rows": -1},
        {"rows": True},
        {"choose": "all"},
        {"characters": 1.5},
        {"step": "one"},
    ],
)
def test_bad_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        completions_table(BATCH, **wrong)


def test_groups_without_metadata_are_refused() -> None:
    with pytest.raises(InputError, match=r"expected StorageItems, as sample\(\)"):
        completions_table({"math": [[RolloutState(message=[])]]})  # type: ignore[list-item]


async def test_rollouts_may_be_of_any_class() -> None:
    async with ReplayBufferConfig(url="memory://", rollout_type=dict).build() as buffer:
        await buffer.put([{"prompt": "why?", "response": "so", "reward": 1.0, "status": "completed"}], "qa")
        drawn = await buffer.sample({"qa": 1})
        [row] = completions_table(drawn, rollout_type=buffer.rollout_type)
    assert (row["prompt"], row["response"], row["reward"], row["tokens"]) == ("why?", "so", 1.0, None)


def test_markdown_shows_a_text_as_it_is() -> None:
    assert as_markdown("a < b & [c](http://d)") == "a &#60; b &#38; &#91;c](http://d)"


def test_what_was_generated_now_and_what_is_replayed_are_apart() -> None:
    found = batch_metrics(BATCH, now=1010.0)
    assert found == {
        "batch/new/groups": 2,
        "batch/new/rollouts": 4,
        "batch/new/reward/mean": 0.625,
        "batch/new/reward/min": 0.25,
        "batch/new/reward/max": 1.0,
        "batch/new/staleness/mean": 1.5,
        "batch/new/staleness/max": 2,
        "batch/new/age_seconds/max": 9.0,
        "batch/replayed/groups": 1,
        "batch/replayed/rollouts": 2,
        "batch/replayed/reward/mean": 0.5,
        "batch/replayed/reward/min": 0.5,
        "batch/replayed/reward/max": 0.5,
        "batch/replayed/staleness/mean": 0.0,
        "batch/replayed/staleness/max": 0,
        "batch/replayed/age_seconds/max": 7.0,
    }
    assert batch_metrics([], now=0.0, prefix="") == {
        "new/groups": 0,
        "new/rollouts": 0,
        "replayed/groups": 0,
        "replayed/rollouts": 0,
    }
