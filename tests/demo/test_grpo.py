"""The trainer: advantages, loss and its gradient, Adam, and that it learns."""

import numpy as np
import pytest

from replaybuf.demo.adam import Adam, clip_by_norm
from replaybuf.demo.arithmetic import PROMPTS, prompt_at
from replaybuf.demo.grpo import GrpoConfig, TokenBatch, Trainer, group_advantages, grpo_loss, token_batch
from replaybuf.demo.policy import Policy
from tests.demo.made import generate_group


def stale_batch(seed=0):
    """A batch sampled by other weights than those of the trainer, with rewards that differ."""
    rng = np.random.default_rng(seed)
    behaviour = Policy.create(seed + 1, hidden=12)
    behaviour.parameters["logits.weight"] *= 30
    groups = [generate_group(behaviour, rng, prompt) for prompt in PROMPTS[::12]]
    for rollout in (rollout for group in groups for rollout in group):
        rollout.reward = {"score": float(rng.random())}
    return groups


def one_token(ratio: float, advantage: float) -> tuple[np.ndarray, TokenBatch]:
    """Uniform logits, and a batch of one token whose importance ratio is `ratio`."""
    logits = np.zeros((1, 4))
    behaviour = np.log(0.25 / ratio)
    return logits, TokenBatch(
        np.zeros((1, 7), np.int32), np.array([2], np.int32), np.array([behaviour]), np.array([advantage]), np.ones(1)
    )


def test_advantages_have_mean_0_and_deviation_1():
    advantages = group_advantages(np.array([0.0, 0.1, 1.0, 1.0]))
    assert (advantages.mean(), advantages.std()) == pytest.approx((0, 1))


def test_equal_rewards_have_no_advantage():
    assert np.all(group_advantages(np.full(8, 0.1)) == 0)


def test_every_rollout_weighs_the_same_whatever_its_length():
    batch = token_batch(stale_batch())
    assert batch.weights.sum() == pytest.approx(1)
    starts = np.flatnonzero(np.all(batch.contexts[:, 5:] == batch.contexts.max(), axis=1))
    assert np.allclose(np.add.reduceat(batch.weights, starts), 1 / len(starts))


def test_masked_tokens_are_not_trained():
    groups = stale_batch()
    before = len(token_batch(groups).tokens)
    groups[0][0].response_mask[-1] = 0
    assert len(token_batch(groups).tokens) == before - 1


def test_lists_train_as_arrays_do():
    groups = stale_batch()
    expected = token_batch(groups)
    for rollout in (rollout for group in groups for rollout in group):
        for field in ("prompt_ids", "response_ids", "logprobs", "response_mask"):
            setattr(rollout, field, getattr(rollout, field).tolist())
    assert np.array_equal(token_batch(groups).behaviour_log_probs, expected.behaviour_log_probs)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (0.5, -1.0)])
def test_a_ratio_that_has_gone_far_enough_has_no_gradient(ratio, advantage):
    _, d_logits, _, clipped = grpo_loss(*one_token(ratio, advantage), GrpoConfig(entropy_bonus=0))
    assert (np.abs(d_logits).max(), clipped) == (0, 1)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, -1.0), (0.5, 1.0), (1.0, 1.0), (1.0, -1.0)])
def test_a_ratio_that_has_far_to_go_has_its_full_gradient(ratio, advantage):
    _, d_logits, _, clipped = grpo_loss(*one_token(ratio, advantage), GrpoConfig(entropy_bonus=0))
    assert (d_logits[0, 2], clipped) == (pytest.approx(-0.75 * ratio * advantage), 0)


def test_the_gradient_of_the_loss_agrees_with_finite_differences():
    batch, config, rng = token_batch(stale_batch()), GrpoConfig(), np.random.default_rng(0)
    policy = Policy.create(0, hidden=12)
    policy.parameters["logits.weight"] *= 30
    logits, tape = policy.forward(batch.contexts)
    _, d_logits, _, clipped = grpo_loss(logits, batch, config)
    gradients = policy.backward(tape, d_logits)
    assert 0 < clipped < 1  # both sides of the minimum are there
    for name, parameter in policy.parameters.items():
        direction = rng.normal(size=parameter.shape)
        losses = []
        for shift in (1e-6, -2e-6):
            parameter += shift * direction
            losses.append(grpo_loss(policy.forward(batch.contexts)[0], batch, config)[0])
        parameter += 1e-6 * direction
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(np.vdot(gradients[name], direction), rel=1e-4), name


def test_the_first_step_of_adam_is_the_rate_against_the_sign():
    parameters = {"x": np.array([1.0, -2.0])}
    Adam(parameters, rate=0.1, weight_decay=0).update(parameters, {"x": np.array([3.0, -0.01])})
    assert parameters["x"] == pytest.approx([0.9, -1.9], rel=1e-5)


def test_adam_follows_the_formulas_of_the_papers():
    rng, rate, (decay1, decay2), weight_decay = np.random.default_rng(0), 0.1, (0.9, 0.98), 0.3
    parameters = {"x": np.ones(3)}
    adam = Adam(parameters, rate=rate, decay=(decay1, decay2), weight_decay=weight_decay)
    x, m, v = np.ones(3), np.zeros(3), np.zeros(3)
    for t in range(1, 6):
        gradient = rng.normal(size=3)
        adam.update(parameters, {"x": gradient})
        m, v = decay1 * m + (1 - decay1) * gradient, decay2 * v + (1 - decay2) * gradient**2
        x = x - rate * (m / (1 - decay1**t) / np.sqrt(v / (1 - decay2**t)) + weight_decay * x)
    assert parameters["x"] == pytest.approx(x, rel=1e-6)


def test_clipping_bounds_the_joint_norm():
    gradients = {"x": np.array([3.0]), "y": np.array([4.0])}
    assert clip_by_norm(gradients, 1.0) == pytest.approx(5)
    assert (gradients["x"][0], gradients["y"][0]) == pytest.approx((0.6, 0.8))


def learn(steps: int, lag: int) -> list[float]:
    """The reward of each step of a run in which every batch comes from the weights of `lag` steps ago."""
    trainer, weights, rewards = Trainer.create(0), [], []
    for step in range(steps):
        weights.append({name: value.copy() for name, value in trainer.policy.parameters.items()})
        behaviour = Policy(weights[max(0, step - lag)])
        indices = range(16 * step, 16 * step + 16)
        groups = [generate_group(behaviour, np.random.default_rng([0, i]), prompt_at(0, i)) for i in indices]
        rewards.append(trainer.train(groups).reward)
    return rewards


def test_the_reward_rises_on_stale_data():
    rewards = learn(100, lag=2)
    assert np.mean(rewards[:10]) < 0.1
    assert np.mean(rewards[-10:]) > 0.35


def test_a_run_repeats_exactly():
    assert learn(5, lag=1) == learn(5, lag=1)


def test_metrics_count_the_step():
    trainer = Trainer.create(0)
    metrics = trainer.train(stale_batch())
    assert trainer.step == 1
    assert 0 <= metrics.reward <= 1
    assert metrics.gradient_norm > 0
