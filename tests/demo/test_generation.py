"""Answers, token by token, and the groups that hold them."""

import numpy as np
import pytest

from replaybuf.demo.arithmetic import END, MAX_RESPONSE_TOKENS, PROMPTS, VOCABULARY_SIZE, Prompt, decode, verify
from replaybuf.demo.generation import Answers, Prompts, prompt_of
from replaybuf.demo.policy import Policy, answer_contexts, log_softmax
from replaybuf.rollouts.rollout import Status
from tests.demo.made import generate_group, new_group, sample, tokens_of

PROMPT = Prompt("14-9=")


@pytest.fixture
def policy() -> Policy:
    """A policy with strong opinions, so that mistakes show."""
    policy = Policy.create(0, hidden=12)
    policy.parameters["logits.weight"] *= 50
    return policy


@pytest.fixture
def group():
    return generate_group(Policy.create(0), np.random.default_rng(0), PROMPT)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_are_those_of_the_distribution_sampled_from(policy, temperature):
    for prompt in PROMPTS:
        for response, stored in sample(policy, prompt, 2, np.random.default_rng(1), temperature):
            logits, _ = policy.forward(answer_contexts(prompt.ids, response))
            expected = log_softmax(logits / temperature)[np.arange(len(response)), response]
            assert np.allclose(stored, expected, atol=1e-5)


def test_tokens_are_sampled_as_often_as_their_probability(policy):
    n = 20_000
    responses = [response for response, _ in sample(policy, PROMPTS[9], n, np.random.default_rng(2))]
    logits, _ = policy.forward(answer_contexts(PROMPTS[9].ids, responses[0][:1]))
    expected = np.exp(log_softmax(logits)[0])
    observed = np.bincount([response[0] for response in responses], minlength=VOCABULARY_SIZE) / n
    assert np.all(np.abs(observed - expected) < 5 * np.sqrt(expected * (1 - expected) / n) + 1e-4)


def test_temperature_0_takes_the_likeliest_token(policy):
    [(response, log_probs)] = sample(policy, PROMPTS[9], 1, np.random.default_rng(0), temperature=0)
    logits, _ = policy.forward(answer_contexts(PROMPTS[9].ids, response))
    assert np.array_equal(response, logits.argmax(axis=1))
    assert np.all(log_probs == 0)


def test_answers_go_to_the_end_token_or_are_cut_off(policy):
    for prompt in PROMPTS:
        for response, _ in sample(policy, prompt, 10, np.random.default_rng(0)):
            assert END not in response[:-1]
            assert response[-1] == END or len(response) == MAX_RESPONSE_TOKENS


def test_an_answer_that_was_interrupted_goes_on_as_if_it_had_not_been(policy):
    randoms = np.random.default_rng(4).random((8, MAX_RESPONSE_TOKENS))
    whole, first = Answers.of(new_group(PROMPT), partial=True), Answers.of(new_group(PROMPT), partial=True)
    while len(whole.unfinished):
        whole.extend(policy, randoms)
    first.extend(policy, randoms)
    kept = new_group(PROMPT)
    first.write(kept)
    assert {rollout.status for rollout in kept} >= {Status.ABORTED}
    second = Answers.of(kept, partial=True)
    while len(second.unfinished):
        second.extend(policy, randoms)
    for row in range(8):
        for one, other in zip(whole.response(row), second.response(row), strict=True):
            assert np.array_equal(one, other)


def test_without_partial_only_finished_answers_stay(policy):
    randoms = np.random.default_rng(4).random((8, MAX_RESPONSE_TOKENS))
    group = new_group(PROMPT)
    answers = Answers.of(group, partial=True)
    answers.extend(policy, randoms)
    answers.extend(policy, randoms)
    answers.write(group)
    statuses = [rollout.status for rollout in group]
    assert {*statuses} == {Status.COMPLETED, Status.ABORTED}
    begun = Answers.of(group, partial=False).lengths
    assert [length > 0 for length in begun] == [status == Status.COMPLETED for status in statuses]


def test_an_interrupted_rollout_has_neither_reward_nor_end(policy):
    group = new_group(PROMPT)
    answers = Answers.of(group, partial=True)
    answers.extend(policy, np.full((8, MAX_RESPONSE_TOKENS), 0.5))
    answers.write(group)
    for rollout in group:
        assert (rollout.status, rollout.reward, rollout.finish_reason) == (Status.ABORTED, None, None)
        assert len(rollout.response_ids) == len(rollout.logprobs) == len(rollout.response_mask) == 1


def test_tokens_are_the_prompt_and_the_response(group):
    for rollout in group:
        assert np.array_equal(rollout.tokens, np.concatenate([rollout.prompt_ids, rollout.response_ids]))
        assert rollout.num_tokens == len(rollout.tokens)


def test_token_fields_are_arrays_of_small_types_with_one_entry_a_token(group):
    fields = ("prompt_ids", "tokens", "response_ids", "response_mask", "logprobs")
    for rollout in group:
        assert [getattr(rollout, field).dtype for field in fields] == [np.int32] * 4 + [np.float32]
        assert len(rollout.response_ids) == len(rollout.logprobs) == len(rollout.response_mask)


def test_a_completed_rollout_has_its_text_and_the_verifiers_reward(group):
    for rollout in group:
        assert rollout.status == Status.COMPLETED
        assert rollout.response == decode(rollout.response_ids)
        assert rollout.reward == {"score": verify(PROMPT, rollout.response_ids)}


def test_the_prompt_can_be_read_back_from_a_group(group):
    assert prompt_of(group) == PROMPT


def test_the_same_random_numbers_give_the_same_group(group):
    assert tokens_of(generate_group(Policy.create(0), np.random.default_rng(0), PROMPT)) == tokens_of(group)


def test_the_dataset_is_the_beginning_of_the_stream():
    prompts = Prompts(3, 80)
    assert len(prompts) == 80
    assert [prompt_of([prompts[index]]) for index in (0, 79)] == [prompt_of([Prompts(3, 100)[i]]) for i in (0, 79)]
    with pytest.raises(IndexError):
        prompts[80]
