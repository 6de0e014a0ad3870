"""The policy: its distribution and its gradients."""

import numpy as np
import pytest

from replaybuf.demo.arithmetic import END, PROMPTS, VOCABULARY_SIZE
from replaybuf.demo.policy import Policy, answer_contexts, log_softmax


@pytest.fixture
def policy() -> Policy:
    """A policy with strong opinions, so that mistakes show."""
    policy = Policy.create(0, hidden=12)
    policy.parameters["logits.weight"] *= 50
    return policy


def test_a_new_policy_is_nearly_uniform():
    logits, _ = Policy.create(0).forward(answer_contexts(PROMPTS[0].ids, np.array([1, 2, END])))
    assert np.allclose(np.exp(log_softmax(logits)), 1 / VOCABULARY_SIZE, atol=0.01)


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
