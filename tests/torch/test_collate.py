"""Collating, and payloads that are loaded later."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from replaybuf import ReplayBufferConfig, RolloutState, Status, StorageItem, load_into
from replaybuf.errors import InputError, RolloutError
from replaybuf.integrations.torch import GroupDataset, Pack, Pad, group_advantages, leased_steps, sequences
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.tasks.handles import ArrayHandle
from replaybuf.values.rollouts.segments import Segments
from tests.integrations.scripts import RANKS, ROOT, printed_by
from tests.torch.conftest import TASK, Ranks, group, totals

TOKENS = st.lists(st.integers(0, 1000), max_size=12)


@st.composite
def rollouts(draw: st.DrawFn) -> RolloutState:
    response = draw(TOKENS)
    as_given = draw(st.sampled_from([list, np.array, torch.tensor]))
    return RolloutState(
        message=[],
        prompt_ids=as_given(draw(st.lists(st.integers(0, 1000), min_size=1, max_size=12))),
        response_ids=as_given(response),
        logprobs=as_given([-float(token) for token in response]),
        response_mask=draw(st.sampled_from([None, [token % 2 for token in response]])),
        reward=draw(st.sampled_from([0.0, 1.0, {"score": 0.5}])),
        status=Status.COMPLETED,
    )


def item(uid: int, group: list[Any]) -> StorageItem[Any]:
    return StorageItem(uid, uid, "math", Status.COMPLETED, 0, 1.0, 1, 0.0, None, item=group)


ITEMS = st.lists(st.lists(rollouts(), min_size=1, max_size=3), min_size=1, max_size=4).map(
    lambda groups: [item(uid, group) for uid, group in enumerate(groups, 1)]
)


def score(rollout: RolloutState) -> float:
    return rollout.reward["score"] if isinstance(rollout.reward, dict) else rollout.reward


def naive(items: list[StorageItem[Any]]) -> list[list[dict[str, Any]]]:
    """For each rollout its tokens, each with all that belongs to it."""
    rows = []
    for member in items:
        scores = [score(rollout) for rollout in member.item]
        mean = sum(scores) / len(scores)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in scores) / len(scores))
        for rollout, value in zip(member.item, scores, strict=True):
            row = []
            for token in rollout.prompt_ids:
                row.append({"input_ids": int(token), "loss_mask": False, "logprobs": 0.0, "advantages": 0.0})
            for place, token in enumerate(rollout.response_ids):
                is_trained = rollout.response_mask is None or bool(rollout.response_mask[place])
                advantage = (value - mean) / (deviation + 1e-6)
                row.append(
                    {
                        "input_ids": int(token),
                        "loss_mask": is_trained,
                        "logprobs": float(rollout.logprobs[place]),
                        "advantages": advantage,
                    }
                )
            for place, cell in enumerate(row):
                cell["labels"] = cell["input_ids"] if cell["loss_mask"] else -100
                cell["position_ids"] = place
                cell["uid"] = member.uid
            rows.append(row)
    return rows


DTYPES = {
    "input_ids": torch.int64,
    "attention_mask": torch.int64,
    "position_ids": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "advantages": torch.float32,
}
PACKED = [name for name in DTYPES if name != "attention_mask"]
PADDING = {**dict.fromkeys(DTYPES, 0), "input_ids": 7, "labels": -100, "loss_mask": False}


@given(items=ITEMS, side=st.sampled_from(["left", "right"]), multiple_of=st.sampled_from([1, 8]))
def test_padding_is_that_of_a_naive_collator(items: list[StorageItem[Any]], side: Any, multiple_of: int) -> None:
    batch = Pad(7, side=side, multiple_of=multiple_of)(items)
    rows = naive(items)
    width = math.ceil(max(map(len, rows)) / multiple_of) * multiple_of
    assert set(batch) == {*DTYPES, "uids"}
    assert batch["uids"].tolist() == [row[0]["uid"] for row in rows]
    for name, dtype in DTYPES.items():
        assert batch[name].dtype == dtype
        assert batch[name].shape == (len(rows), width)
        for number, row in enumerate(rows):
            values = [cell.get(name, 1) for cell in row]
            padding = [PADDING[name]] * (width - len(row))
            expected = values + padding if side == "right" else padding + values
            assert batch[name][number].tolist() == pytest.approx(expected, rel=1e-5)


@given(items=ITEMS, most=st.integers(24, 60))
def test_packed_rows_have_every_sequence_once(items: list[StorageItem[Any]], most: int) -> None:
    rows = naive(items)
    actual = []
    for batch in Pack(most)(items):
        ends = batch["cu_seqlens"].tolist()
        assert batch["cu_seqlens"].dtype == torch.int32
        assert batch["input_ids"].shape == (1, ends[-1])
        assert ends[-1] <= most
        assert "attention_mask" not in batch
        pairs = list(itertools.pairwise(ends))
        assert int(batch["max_seqlen"]) == max(end - begin for begin, end in pairs)
        for uid, (begin, end) in zip(batch["uids"].tolist(), pairs, strict=True):
            actual.append([uid, *(batch[name][0, begin:end].tolist() for name in PACKED)])
    expected = [[row[0]["uid"], *([cell[name] for cell in row] for name in PACKED)] for row in rows]
    assert same(actual, expected)


def same(actual: list[Any], expected: list[Any]) -> bool:
    def rounded(rows: list[Any]) -> list[str]:
        return sorted(str([[round(float(x), 3) + 0.0 for x in np.ravel(part)] for part in row]) for row in rows)

    return rounded(actual) == rounded(expected)


def test_logprobs_are_left_out_unless_all_have_them() -> None:
    group = [RolloutState(message=[], prompt_ids=[1], response_ids=[2], reward=1.0) for _ in range(2)]
    group[0].logprobs = [-1.0]
    assert "logprobs" not in Pad(0)([item(1, group)])
    assert "logprobs" not in Pack(10)([item(1, group)])[0]


def test_segments_of_a_rollout_have_its_advantage() -> None:
    """In a tree, too; a segment without a reward is no mistake."""
    group = [{"prompt_ids": [1], "response_ids": [2], "reward": reward} for reward in (None, 1.0, 0.0, 3.0)]
    for segments in (Segments([None, 0, 0, None]), Segments([None, 0, 0, None], [3, 0])):
        samples = sequences([replace(item(1, group), segments=segments)], advantages=lambda rewards: rewards)
        assert [sequence.advantages[-1] for sequence in samples] == [0.5, 0.5, 0.5, 3.0]


def test_other_names_and_dicts() -> None:
    rollout = {"prompt": [1, 2], "tokens": np.array([3]), "score": torch.tensor(1.0)}
    fields = {"prompt_ids": "prompt", "response_ids": "tokens", "reward": "score", "logprobs": None}
    [sequence] = sequences([item(5, [rollout])], fields=fields, advantages=lambda rewards: [2 * x for x in rewards])
    assert sequence.input_ids.tolist() == [1, 2, 3]
    assert sequence.advantages.tolist() == [0, 0, 2]
    assert (sequence.logprobs, sequence.uid, len(sequence)) == (None, 5, 3)


def test_advantages_of_a_group() -> None:
    assert group_advantages([1.0, 1.0]) == [0.0, 0.0]
    assert group_advantages([0.0, 1.0]) == pytest.approx([-1, 1], abs=1e-5)


GOOD = RolloutState(message=[], prompt_ids=[1], response_ids=[2, 3], reward=1.0)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"prompt_ids": None}, "group 4, rollout 1 has no prompt_ids"),
        ({"response_ids": None}, "group 4, rollout 1 has no response_ids"),
        ({"logprobs": [0.0]}, "group 4, rollout 1: logprobs has 1 numbers, and response_ids 2"),
        ({"logprobs": [0.0, None]}, r"group 4, rollout 1: logprobs\[1\] is None: leave the field out"),
        ({"response_mask": [None, 1]}, r"group 4, rollout 1: response_mask\[0\] is None"),
        ({"response_mask": [1] * 3}, "group 4, rollout 1: response_mask has 3 numbers"),
        ({"response_ids": ["a"]}, "group 4, rollout 1: response_ids isn't a row of numbers"),
        ({"response_ids": [[1, 2]]}, r"response_ids has the shape \(1, 2\)"),
        ({"reward": None}, "group 4, rollout 1 has no reward: expected a finite number, got None"),
        ({"reward": math.nan}, "group 4, rollout 1 has no reward"),
    ],
)
def test_a_rollout_that_does_not_fit_is_named(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(RolloutError, match=what):
        Pad(0)([item(4, [GOOD, GOOD.model_copy(update=changes)])])


def test_nothing_is_cut_or_made_up() -> None:
    for call, message in (
        (lambda: Pad(0, max_tokens=2)([item(4, [GOOD])]), "a sequence of group 4 has 3 tokens; max_tokens is 2"),
        (lambda: Pack(2)([item(4, [GOOD])]), "sequence 0 has a length of 3, more than the 2 of a row"),
        (lambda: Pad(0)([]), "no sequences to pad"),
        (lambda: Pack(9).pack([]), "no sequences to pack"),
        (lambda: Pad(0, side="top"), "side must be 'right' or 'left', got 'top'"),  # type: ignore[arg-type]
        (lambda: Pad(0, multiple_of=0), "multiple_of must be a whole number of at least 1"),
        (lambda: Pack(0), "max_tokens must be a whole number of at least 1"),
        (lambda: Pad(0, fields={"respons_ids": "tokens"}), "'respons_ids' is none of prompt_ids, response_ids"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    with pytest.raises(RolloutError, match="advantages gave 1 numbers for its 2 rollouts"):
        sequences([item(4, [GOOD, GOOD])], advantages=lambda rewards: [0.0])


SIZE = 300_000  # int16, of each rollout


@pytest.fixture(params=["database", "folder"])
def filled(request: pytest.FixtureRequest, shared_url: str, tmp_path: Path) -> ReplayBufferConfig:
    """Four groups with tensors, whose items are the group's number."""
    payloads = "database" if request.param == "database" else str(tmp_path / "payloads")
    (tmp_path / "payloads").mkdir()
    config = ReplayBufferConfig(url=shared_url, payloads=payloads, policy="fifo")

    async def put() -> None:
        async with config.build() as buffer:
            for number in range(4):
                rollouts = group(number)
                for rollout in rollouts:
                    rollout.rollout_id, rollout.routed_experts = number, torch.full((SIZE,), number, dtype=torch.int16)
                await buffer.put(rollouts, TASK)

    asyncio.run(put())
    return config


#: What each of two ranks has of the groups, in batches of two.
OWN = {
    "split": (0, [[0, 2], [1, 3]]),
    "same": (1, [[0, 1, 2, 3], [0, 1, 2, 3]]),
}


@pytest.mark.parametrize("way", OWN)
def test_each_rank_loads_its_own_part(filled: ReplayBufferConfig, ranks: Ranks, way: str) -> None:
    number, expected = OWN[way]
    lines_of_ranks = [rank.end()[0].splitlines() for rank in ranks.start("tensors", number)]
    loaded = [lines[:-1] for lines in lines_of_ranks]
    assert loaded == [[_line(number) for number in numbers] for numbers in expected]
    if filled.payloads != "database":  # whose handles carry their bytes
        assert all(int(lines[-1].removeprefix("sent ")) < SIZE / 10 for lines in lines_of_ranks)
    assert (totals(filled)[Tally.TAKEN], totals(filled)[Tally.SIZE]) == (4, 0)


def _line(number: int) -> str:
    return f"{number} {[number * SIZE] * 2}"


def test_a_trainer_loads_what_its_worker_has_leased(filled: ReplayBufferConfig) -> None:
    dataset = GroupDataset(filled, {TASK: 2}, timeout=0, deferred=["routed_experts"])
    with leased_steps(DataLoader(dataset, batch_size=None, num_workers=1)) as steps, next(steps) as step:
        assert all(type(rollout.routed_experts) is ArrayHandle for item in step.batch for rollout in item.item)
        sums = [int(rollout.routed_experts.sum()) for item in load_into(step.batch) for rollout in item.item]
        assert sums == [0, 0, SIZE, SIZE]


def test_a_misspelt_field_is_refused_at_once(filled: ReplayBufferConfig) -> None:
    with pytest.raises(InputError, match=r"no field 'routed_expert'; it has .*routed_experts"):
        GroupDataset(filled, {TASK: 1}, deferred=["routed_expert"])


def test_the_example_balances_by_sql_and_each_rank_reads_its_own(tmp_path: Path) -> None:
    printed = printed_by([*RANKS, str(ROOT / "docs/examples/deferred_ranks.py")], tmp_path)
    for number, tokens, size in ((1, 810, 607), (2, 2010, 1507)):
        for rank in range(2):
            assert f"step {number}, rank {rank}: 2 groups, {tokens} tokens, {size} KB" in printed
