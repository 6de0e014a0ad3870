"""The policy: sampling, log-probabilities, gradients."""

import numpy as np
import pytest

from replaybuf.demo.arithmetic import END, MAX_RESPONSE_TOKENS, PROMPTS, VOCABULARY_SIZE
from replaybuf.demo.policy import Policy, answer_contexts, log_softmax


@pytest.fixture
def policy() -> Policy:
    """A policy with strong opinions, so that mistakes show."""
    policy = Policy.create(0, hidden=12)
    policy.parameters["logits.weight"] *= 50
    return policy


def log_probs_of(policy, prompt, response, temperature=1.0):
    logits, _ = policy.forward(answer_contexts(prompt, response))
    return log_softmax(logits / temperature)[np.arange(len(response)), response]


def test_a_new_policy_is_nearly_uniform():
    logits, _ = Policy.create(0).forward(answer_contexts(PROMPTS[0].ids, np.array([1, 2, END])))
    assert np.allclose(np.exp(log_softmax(logits)), 1 / VOCABULARY_SIZE, atol=0.01)


def test_the_same_seed_samples_the_same(policy):
    prompts = [p.ids for p in PROMPTS]
    first, second = (policy.sample(prompts, np.random.default_rng(5)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_log_probs_are_those_of_the_distribution_sampled_from(policy, temperature):
    prompts = [p.ids for p in PROMPTS]
    for prompt, response, stored in zip(
        prompts, *policy.sample(prompts, np.random.default_rng(1), temperature), strict=True
    ):
        assert np.allclose(stored, log_probs_of(policy, prompt, response, temperature), atol=1e-5)


def test_tokens_are_sampled_as_often_as_their_probability(policy):
    prompt, n = PROMPTS[9].ids, 20_000
    responses, _ = policy.sample([prompt] * n, np.random.default_rng(2))
    logits, _ = policy.forward(answer_contexts(prompt, responses[0][:1]))
    expected = np.exp(log_softmax(logits)[0])
    observed = np.bincount([r[0] for r in responses], minlength=VOCABULARY_SIZE) / n
    assert np.all(np.abs(observed - expected) < 5 * np.sqrt(expected * (1 - expected) / n) + 1e-4)


def test_temperature_0_takes_the_likeliest_token(policy):
    prompt = PROMPTS[9].ids
    (response,), (log_probs,) = policy.sample([prompt], np.random.default_rng(0), temperature=0)
    logits, _ = policy.forward(answer_contexts(prompt, response))
    assert np.array_equal(response, logits.argmax(axis=1))
    assert np.all(log_probs == 0)


def test_answers_go_to_the_end_token_or_are_cut_off(policy):
    responses, _ = policy.sample([p.ids for p in PROMPTS] * 10, np.random.default_rng(0))
    for response in responses:
        assert END not in response[:-1]
        assert response[-1] == END or len(response) == MAX_RESPONSE_TOKENS


def test_sampled_arrays_are_int32_and_float32(policy):
    responses, log_probs = policy.sample([PROMPTS[0].ids], np.random.default_rng(0))
    assert (responses[0].dtype, log_probs[0].dtype) == (np.int32, np.float32)


def test_gradients_agree_with_finite_differences(policy):
    rng = np.random.default_rng(0)
    contexts = np.concatenate([answer_contexts(p.ids, np.array([1, 2, END])) for p in PROMPTS[::9]])
    d_logits = rng.normal(size=(len(contexts), VOCABULARY_SIZE))
    gradients = policy.backward(policy.forward(contexts)[1], d_logits)

    def value():
        return np.vdot(policy.forward(contexts)[0], d_logits)

    for name, parameter in policy.parameters.items():
        direction = rng.normal(size=parameter.shape)
        parameter += 1e-5 * direction
        above = value()
        parameter -= 2e-5 * direction
        below = value()
        parameter += 1e-5 * direction
        assert (above - below) / 2e-5 == pytest.approx(np.vdot(gradients[name], direction), rel=1e-6), name
