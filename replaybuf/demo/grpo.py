"""The trainer of the demo: Group Relative Policy Optimization, Shao et al. 2024 (arXiv:2402.03300), section 4.1.

A rollout's advantage is its reward against those of its group, A = (r - mean) / std, the same for all its tokens. The
loss is the negative of equation 3 without the KL term (there is no reference model),

    J = 1/R sum_i 1/|o_i| sum_t min(ratio A, clip(ratio, 1 - low, 1 + high) A),    ratio = pi(o_t) / pi_behaviour(o_t),

over the R rollouts of a batch, plus a bonus on the entropy of pi, without which a policy that starts from nothing
settles on its first lucky answers. `pi_behaviour` is what the rollout stored when it was sampled, however many steps
ago; so data that is a few steps stale is weighted correctly, and clipped where the policy has moved away from it. The
range is wider above than below (Yu et al. 2025, arXiv:2503.14476, section 3.1), so that rare right answers can grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replaybuf.demo.adam import Adam, clip_by_norm
from replaybuf.demo.arithmetic import RIGHT_REWARD, IntArray
from replaybuf.demo.policy import FloatArray, Policy, answer_contexts, log_softmax
from replaybuf.rollouts.rollout import RolloutState


@dataclass(frozen=True)
class GrpoConfig:
    """The settings of the loss."""

    clip_low: float = 0.3
    clip_high: float = 0.4
    entropy_bonus: float = 0.25
    max_gradient_norm: float = 1.0


@dataclass(frozen=True)
class TokenBatch:
    """The trained tokens of a batch, one row each (N rows); `weights` are 1 / (R |o_i|) and add up to 1."""

    contexts: IntArray  # int32 [N, slots]
    tokens: IntArray  # int32 [N]
    behaviour_log_probs: FloatArray  # float64 [N]
    advantages: FloatArray  # float64 [N]
    weights: FloatArray  # float64 [N]


@dataclass(frozen=True)
class Metrics:
    """Metrics of one training step: means over the batch, before the update."""

    reward: float
    accuracy: float
    entropy: float
    clip_fraction: float
    gradient_norm: float
    loss: float


class Trainer:
    """Policy, optimiser and the number of training steps done."""

    def __init__(self, policy: Policy, adam: Adam, *, step: int = 0, config: GrpoConfig | None = None) -> None:
        self.policy, self.adam, self.step = policy, adam, step
        self.config = config or GrpoConfig()

    @classmethod
    def create(cls, seed: int) -> Trainer:
        """Return a trainer at step 0."""
        policy = Policy.create(seed)
        return cls(policy, Adam(policy.parameters))

    def train(self, groups: Sequence[Sequence[RolloutState]]) -> Metrics:
        """Make one update from a batch of groups. Return its metrics."""
        batch = token_batch(groups)
        logits, tape = self.policy.forward(batch.contexts)
        loss, d_logits, entropy, clip_fraction = grpo_loss(logits, batch, self.config)
        gradients = self.policy.backward(tape, d_logits)
        norm = clip_by_norm(gradients, self.config.max_gradient_norm)
        self.adam.update(self.policy.parameters, gradients)
        self.step += 1
        rewards = np.concatenate([group_rewards(group) for group in groups])
        accuracy = float((rewards == RIGHT_REWARD).mean())
        return Metrics(float(rewards.mean()), accuracy, entropy, clip_fraction, norm, loss)


def group_rewards(group: Sequence[RolloutState]) -> FloatArray:
    """Return the reward of each rollout: float64 [rollouts]."""
    return np.array([rollout.reward["score"] for rollout in group], dtype=np.float64)


def group_advantages(rewards: FloatArray) -> FloatArray:
    """Return (r - mean) / std of one group: float64 [rollouts]; all zero if the rewards are all the same."""
    deviations = rewards - rewards.mean()
    std = rewards.std()
    advantages: FloatArray = deviations / std if std > 1e-6 else np.zeros_like(deviations)
    return advantages


def token_batch(groups: Sequence[Sequence[RolloutState]]) -> TokenBatch:
    """Return the tokens of all rollouts to train on: those that the response mask keeps."""
    advantages = np.concatenate([group_advantages(group_rewards(group)) for group in groups])
    rollouts = [rollout for group in groups for rollout in group]
    rows = [_token_rows(rollout) for rollout in rollouts]
    contexts, tokens, log_probs = (np.concatenate(column) for column in zip(*rows, strict=True))
    lengths = np.array([len(tokens) for _, tokens, _ in rows])
    return TokenBatch(
        contexts=contexts,
        tokens=tokens,
        behaviour_log_probs=log_probs,
        advantages=np.repeat(advantages, lengths),
        weights=1.0 / (len(rollouts) * np.repeat(lengths, lengths)),
    )


def _token_rows(rollout: RolloutState) -> tuple[IntArray, IntArray, FloatArray]:
    """Return contexts, tokens and behaviour log-probabilities of one rollout's trained tokens."""
    mask = np.asarray(rollout.response_mask, dtype=bool)
    prompt = np.asarray(rollout.prompt_ids, dtype=np.int32)
    response = np.asarray(rollout.response_ids, dtype=np.int32)
    log_probs = np.asarray(rollout.logprobs, dtype=np.float64)
    return answer_contexts(prompt, response)[mask], response[mask], log_probs[mask]


def grpo_loss(logits: FloatArray, batch: TokenBatch, config: GrpoConfig) -> tuple[float, FloatArray, float, float]:
    """Return loss, gradient on the logits (float64 [N, vocabulary]), mean entropy, and the share of tokens clipped."""
    log_probs = log_softmax(logits)
    probs = np.exp(log_probs)
    rows = np.arange(len(batch.tokens))
    ratio = np.exp(log_probs[rows, batch.tokens] - batch.behaviour_log_probs)
    unclipped = ratio * batch.advantages
    clipped = np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * batch.advantages
    entropy = -(probs * log_probs).sum(axis=1)
    objective = np.minimum(unclipped, clipped) + config.entropy_bonus * entropy
    # d ratio / d logits = ratio (onehot - probs), and nothing where the clipped term is the smaller;
    # d entropy / d logits = -probs (log_probs + entropy)
    pull = np.where(unclipped <= clipped, unclipped, 0.0)
    d_objective = -pull[:, None] * probs - config.entropy_bonus * probs * (log_probs + entropy[:, None])
    d_objective[rows, batch.tokens] += pull
    loss = -float(batch.weights @ objective)
    return loss, -batch.weights[:, None] * d_objective, float(entropy.mean()), float((clipped < unclipped).mean())
