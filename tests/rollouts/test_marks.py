"""Marks: what a refresh changes of them, and what they then make of decoded rollouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf import RolloutState, Status
from replaybuf.values.rollouts.marks import Marks
from replaybuf.values.rollouts.normalise import normalise
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.values.rollouts.staleness import ExpiryRule

KIND = RolloutType(RolloutState)
RULE = ExpiryRule(stale_threshold=4)


def rollout(step: int | None, reward: float = 1.0) -> RolloutState:
    ids = [] if step is None else [7]
    steps = [] if step is None else [step]
    return RolloutState(
        message=[], status=Status.COMPLETED, response_ids=ids, response_model_steps=steps, reward=reward
    )


def test_what_expires_loses_its_steps_and_its_reward() -> None:
    marks = Marks.of([rollout(0, reward=1.0), rollout(5, reward=3.0)], KIND)
    assert marks.expire(RULE, 6)
    assert (marks.oldest, marks.newest, marks.expired) == ([None, 5], [None, 5], [True, False])
    assert marks.mean_reward == 3.0


def test_a_refresh_in_which_nothing_expires_changes_nothing() -> None:
    rollouts = [rollout(5), rollout(None)]
    marks = Marks.of(rollouts, KIND)
    assert not marks.expire(RULE, 6)
    assert marks == Marks.of(rollouts, KIND)


def test_a_mixed_group_has_rollouts_with_steps_and_without() -> None:
    assert Marks.of([rollout(5), rollout(None)], KIND).mixed
    assert not Marks.of([rollout(5), rollout(6)], KIND).mixed
    assert not Marks.of([rollout(None)], KIND).mixed


def test_marks_are_applied_to_rollouts() -> None:
    """The expired ones lose their response, the others have their staleness at the step."""
    rollouts = [rollout(0), rollout(5)]
    marks = Marks.of(rollouts, KIND)
    marks.expire(RULE, 6)
    marks.apply(rollouts, 8, KIND)
    assert [member.status for member in rollouts] == [Status.EXPIRED, Status.COMPLETED]
    assert [member.response_ids for member in rollouts] == [[], [7]]
    assert [member.seq_staleness for member in rollouts] == [0, 2]


async def test_the_staleness_of_a_group_that_expires_in_its_put_is_pinned() -> None:
    """Its rollouts keep the staleness with which they expired: it is not one of a train step."""
    outcome = await normalise([rollout(0), rollout(5)], KIND, None, 6, RULE)
    assert (outcome.status, outcome.staleness, outcome.train_step) == (Status.EXPIRED, 5, None)
    fresh = await normalise([rollout(5)], KIND, None, 6, RULE)
    assert (fresh.status, fresh.staleness, fresh.train_step) == (Status.COMPLETED, 0, 6)


async def test_a_group_that_was_interrupted_before_its_first_token_needs_no_steps() -> None:
    changes = {"response": "", "response_ids": np.array([], "i4"), "logprobs": np.array([]), "status": Status.ABORTED}
    assert (await normalise([rollout(None).model_copy(update=changes)], KIND, None, 6, RULE)).doubts == {}
    changes |= {"response_ids": np.array([7], "i4")}
    assert "undated" in (await normalise([rollout(None).model_copy(update=changes)], KIND, None, 6, RULE)).doubts


async def test_a_threshold_without_a_train_step_is_doubted_unless_the_rollouts_know_their_staleness() -> None:
    assert "unstepped" in (await normalise([rollout(None)], KIND, 5, None, RULE)).doubts
    dated = rollout(None).model_copy(update={"seq_staleness": 1})
    assert (await normalise([dated], KIND, 5, None, RULE)).doubts == {}


async def test_what_expired_before_is_dropped_where_nothing_is_tried_again() -> None:
    outcome = await normalise([rollout(None)], KIND, None, 6, ExpiryRule(4, retryable=False), Status.EXPIRED)
    assert outcome.dropped


@pytest.mark.parametrize("response", [7, np.array(1.5), object()])
def test_a_response_may_be_anything(response: Any) -> None:
    """Of dicts; it is one that a refresh removes."""
    marks = Marks.of([{"status": "expired", "response": response}], RolloutType(dict), Status.EXPIRED)
    assert marks.due == [True]


@given(st.lists(st.integers(3, 5), max_size=4), st.lists(st.integers(0, 1), max_size=5), st.data())
def test_the_range_of_steps_is_that_of_all_tokens_and_of_the_trainable_ones(
    steps: list[int], mask: list[int], data: st.DataObject
) -> None:
    """Whether all tokens have the same step or not, in lists as in arrays; tokens without one count as the oldest."""
    trainable = [step for step, flag in zip(steps, mask, strict=False) if flag]
    if steps and any(mask[len(steps) :]) and not trainable:
        trainable = [min(steps)]

    def tokens(values: list[int]) -> Any:
        return data.draw(st.sampled_from([values, np.array(values, "i4"), tuple(values)]))

    rollouts = [{"response_model_steps": tokens(steps), "response_mask": tokens(mask), "response_ids": [1]}]
    marks = Marks.of(rollouts, RolloutType(dict))
    assert marks.oldest == [min(steps, default=None)]
    assert marks.newest == [max(trainable, default=None)]
    assert Marks.of([{"response_model_steps": tokens(steps), "response_ids": [1]}], RolloutType(dict)).newest == [
        max(steps, default=None)
    ]
    assert Marks.of([rollouts[0] | {"labels": [1]}], RolloutType(dict)).newest == [None]


def test_one_token_of_other_weights_is_found_in_a_long_response() -> None:
    for place in (0, 5000, 9999):
        steps = np.full(10_000, 5, "i4")
        assert marks_of(steps) == (5, 5)
        steps[place] = 3
        assert marks_of(steps) == (3, 5)
        assert marks_of(steps.reshape(2, -1)) == (3, 5)


def marks_of(steps: Any) -> tuple[int | None, int | None]:
    marks = Marks.of([{"response_model_steps": steps, "response_ids": [1]}], RolloutType(dict))
    return marks.oldest[0], marks.newest[0]
