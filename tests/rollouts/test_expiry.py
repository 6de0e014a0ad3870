"""Expiry in a put: who expires by the oldest token, or by all tokens; what is left of a rollout then, and masks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from replaybuf import RolloutState, Status
from replaybuf.errors import RolloutError
from replaybuf.values.rollouts.normalise import Normalised, normalise
from replaybuf.values.rollouts.staleness import ExpiryRule
from tests.contract.harness import CODEC, plain, rollout

AGE: dict[str, Any] = {"stale_threshold": 4}
TOKENS: dict[str, Any] = {"token_stale_threshold": 4}


async def put(rollouts: list[RolloutState], step: int | None = 10, **rule: Any) -> Normalised:
    return await normalise(rollouts, CODEC.rollout_type, None, step, ExpiryRule(**rule))


async def test_tokens_that_have_a_step_keep_it_and_model_steps_of_arrays_are_arrays() -> None:
    """An array is extended by its own dtype; where response_ids are an array the steps become one."""
    rollouts = [
        rollout(1, response_model_steps=np.array([3], dtype=np.int16)),
        rollout(2, response_ids=np.array([5, 6])),
        rollout(3, response_model_steps=[3]),
    ]
    await normalise(rollouts, CODEC.rollout_type, 7, None, ExpiryRule())
    *arrays, listed = [member.response_model_steps for member in rollouts]
    assert [(array.dtype, array.tolist()) for array in arrays] == [(np.int16, [3, 7, 7]), (np.int32, [7, 7])]
    assert listed == [3, 7, 7]


@pytest.mark.parametrize("length", [2, 5000])
async def test_model_steps_that_a_put_fills_in_are_each_rollouts_own(length: int) -> None:
    rollouts = [rollout(number, response_ids=np.arange(length)) for number in range(2)]
    await normalise(rollouts, CODEC.rollout_type, 7, None, ExpiryRule())
    rollouts[0].response_model_steps[0] = 3
    assert rollouts[1].response_model_steps.tolist() == [7] * length


async def test_staleness_is_that_of_the_oldest_token() -> None:
    """`T - min(response_model_steps) - 1` of a rollout, below 0 if the model is ahead; the largest of a group."""
    rollouts = [rollout(1, response_model_steps=[5, 2]), rollout(2, response_model_steps=[11]), rollout(3)]
    assert (await put(rollouts)).staleness == 7
    assert [member.seq_staleness for member in rollouts] == [7, -2, 0]


async def test_without_a_train_step_their_own_staleness_counts() -> None:
    rollouts = [rollout(1, seq_staleness=1), rollout(2, seq_staleness=4, response_model_steps=[0])]
    rollouts.append(rollout(3, seq_staleness=2))
    assert (await put(rollouts, None, **AGE)).staleness == 4
    fates = [(member.status, member.seq_staleness) for member in rollouts]
    assert fates == [("completed", 1), ("expired", 4), ("completed", 2)]


#: Fields of a rollout, at train step 10; the rule; and whether it expires.
EXPIRES: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"response_model_steps": [6]}, AGE, False),
    ({"response_model_steps": [5]}, AGE, True),  # its staleness equals the threshold
    *(({"response_model_steps": [0], "status": status}, AGE, True) for status in (Status.ABORTED, Status.EXPIRED)),
    *(
        ({"response_model_steps": [0], "status": status}, AGE, False)
        for status in (Status.INIT, Status.FAILED, Status.FILTERED, Status.ARCHIVED)
    ),
    ({"response_model_steps": [0, 6, 1]}, TOKENS, False),  # its newest token has staleness 3
    ({"response_model_steps": [0, 5, 1]}, TOKENS, True),
    ({"response_model_steps": [0, 6, 1], "response_mask": [1, 0, 1]}, TOKENS, True),  # the newest isn't trainable
    ({"response_model_steps": [0, 5, 1], "response_mask": [0, 0, 0]}, TOKENS, False),  # none is: exempt
    ({"response_model_steps": [0, 5, 1], "response_mask": None}, TOKENS, True),
    ({"response_model_steps": [0], "response_mask": [0, 1, 1]}, TOKENS, True),  # as old as the oldest
    ({"response_model_steps": [6], "response_mask": [0, 1, 1]}, TOKENS, False),
    ({"response_model_steps": [], "response_ids": []}, TOKENS, False),  # no response: exempt
    ({"response_model_steps": [0, 0, 0], "input_ids": [1]}, TOKENS, False),  # agentic: exempt
    ({"response_model_steps": [0, 0, 0], "labels": [1]}, TOKENS, False),
    ({"response_model_steps": np.array([0, 6, 1]), "response_mask": np.array([1, 0, 1])}, TOKENS, True),
    ({"response_model_steps": [0, 9]}, {"stale_threshold": 6} | TOKENS, True),  # by the one or the other
    ({"response_model_steps": [5, 5]}, {"stale_threshold": 6} | TOKENS, True),
    ({"response_model_steps": [5, 9]}, {"stale_threshold": 6} | TOKENS, False),
]


@pytest.mark.parametrize(("fields", "rule", "expires"), EXPIRES)
async def test_a_rollout_expires_by_its_oldest_token_or_when_no_trainable_one_is_new(
    fields: dict[str, Any], rule: dict[str, Any], expires: bool
) -> None:
    """Groups of other statuses than completed, aborted and expired don't."""
    [member] = rollouts = [rollout(1, **deepcopy(fields))]
    before = member.status
    assert (await put(rollouts, **rule)).status == member.status == (Status.EXPIRED if expires else before)
    assert member.response == ("" if expires else "the answer")


async def test_agentic_rollouts_exempt_their_group_from_expiry_by_token() -> None:
    put_ = [rollout(1, response_model_steps=[0]), rollout(2, response_model_steps=[0], input_ids=[1])]
    assert (await put(put_, **TOKENS)).status is Status.COMPLETED


async def test_an_expired_rollout_loses_its_response_and_the_others_keep_all_they_have() -> None:
    """Tokens go back to the prompt; prompt, message, mm_info and extra_fields stay."""
    fields: dict[str, Any] = {"mm_info": {"image": "x"}, "routed_experts": [1], "error_msg": "e", "labels": None}
    expired, unexpired = rollout(1, response_model_steps=[0], **fields), rollout(2, response_model_steps=[8])
    before, other = deepcopy(expired), plain(rollout(2, response_model_steps=[8], seq_staleness=1))
    outcome = await put([expired, unexpired], **AGE)
    assert (outcome.status, outcome.staleness) == (Status.EXPIRED, 9)
    assert (expired.status, expired.response, expired.tokens, expired.seq_staleness) == ("expired", "", [1, 2], 9)
    assert (expired.response_ids, expired.logprobs, expired.response_model_steps) == ([], [], [])
    left_out = ("routed_experts", "finish_reason", "response_mask", "reward", "error_msg")
    assert [getattr(expired, name) for name in left_out] == [None] * 5
    stays = ("rollout_id", "message", "prompt_ids", "mm_info", "extra_fields")
    assert [plain(getattr(expired, name)) for name in stays] == [plain(getattr(before, name)) for name in stays]
    assert plain(unexpired) == other


async def test_a_group_that_is_not_retryable_is_dropped_as_it_is() -> None:
    """Every rollout is EXPIRED, and keeps its response; also of a group that had expired before."""
    for steps, rule in (([0], AGE), (None, {})):
        rollouts = [rollout(1, response_model_steps=steps), rollout(2)]
        if not rule:
            rollouts[0].status = Status.EXPIRED
        assert (await put(rollouts, retryable=False, **rule)).dropped
        assert [(member.status, member.response) for member in rollouts] == [(Status.EXPIRED, "the answer")] * 2


@pytest.mark.parametrize(
    ("fields", "mask"),
    [
        ({"response_model_steps": [5, 6, 9]}, [0, 1, 1]),  # as old as the threshold, and younger
        ({"response_model_steps": [2, 6, 9], "response_mask": [1, 0, 1]}, [0, 0, 1]),
        ({"response_model_steps": [2, 6, 9], "response_mask": None}, [0, 1, 1]),
        ({"response_model_steps": [6, 9, 9], "response_mask": None}, None),
        ({"response_model_steps": [2, 6, 9], "labels": [1]}, [1, 1, 1]),  # agentic: exempt
        ({"response_model_steps": [2, 9]}, [0, 1, 0]),  # a token without a step is as old as the oldest
        ({"response_model_steps": [6]}, [1, 1, 1]),
    ],
)
async def test_tokens_at_or_over_the_threshold_are_masked(fields: dict[str, Any], mask: list[int] | None) -> None:
    """A response without a mask gets one."""
    [member] = rollouts = [rollout(1, **fields)]
    await put(rollouts, **TOKENS)
    assert (member.status, member.response_mask) == ("completed", mask)


async def test_a_response_without_steps_has_no_age() -> None:
    """With a token threshold it is refused, with the way out; agentic groups, and masked responses, are exempt."""
    for steps in (None, []):
        with pytest.raises(
            RolloutError, match=r"rollouts\[1\] has a response without response_model_steps.*model_step"
        ):
            await put([rollout(1, response_ids=[]), rollout(2, response_model_steps=steps)], **TOKENS)
    for fields in ({"labels": [1]}, {"response_mask": [0, 0, 0]}, {"response_ids": []}, {"status": Status.FAILED}):
        assert (await put([rollout(1, **fields)], **TOKENS)).status == fields.get("status", Status.COMPLETED)
