"""Groups as a rollout worker makes them."""

import numpy as np
import pytest

from replaybuf.demo.arithmetic import Prompt, decode, verify
from replaybuf.demo.generation import generate_group, prompt_of
from replaybuf.demo.policy import Policy
from replaybuf.rollout import Status

PROMPT = Prompt("14-9=")


@pytest.fixture
def group():
    return generate_group(Policy.create(0), np.random.default_rng(0), PROMPT)


def test_a_group_has_eight_completed_rollouts(group):
    assert [rollout.status for rollout in group] == [Status.COMPLETED] * 8


def test_tokens_are_the_prompt_and_the_response(group):
    for rollout in group:
        assert np.array_equal(rollout.tokens, np.concatenate([rollout.prompt_ids, rollout.response_ids]))
        assert rollout.num_tokens == len(rollout.tokens)


def test_fields_of_a_response_have_one_entry_a_token(group):
    for rollout in group:
        assert len(rollout.response_ids) == len(rollout.logprobs) == len(rollout.response_mask)


def test_token_fields_are_arrays_of_small_types(group):
    fields = ("prompt_ids", "tokens", "response_ids", "response_mask", "logprobs")
    for rollout in group:
        assert [getattr(rollout, field).dtype for field in fields] == [np.int32] * 4 + [np.float32]


def test_the_reward_is_that_of_the_verifier(group):
    assert [r.reward for r in group] == [{"score": verify(PROMPT, r.response_ids)} for r in group]


def test_the_response_is_the_decoded_text(group):
    assert [r.response for r in group] == [decode(r.response_ids) for r in group]


def test_the_prompt_can_be_read_back_from_a_group(group):
    assert prompt_of(group) == PROMPT


def test_the_same_generator_state_gives_the_same_group(group):
    again = generate_group(Policy.create(0), np.random.default_rng(0), PROMPT)
    assert [r.response for r in again] == [r.response for r in group]
