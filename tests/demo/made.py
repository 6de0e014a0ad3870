"""Groups as a sampler and an engine make them, without these."""

from __future__ import annotations

from collections.abc import Sequence

from replaybuf.cli.demo.policy import Engine, Policy, encode
from replaybuf.cli.demo.worker import GROUP_SIZE
from replaybuf.values.rollouts.rollout import RolloutState


def new_group(prompt: str = "14-9=", number: int = 0) -> list[RolloutState]:
    """Rollouts to be generated, as a sampler gives them."""
    return [
        RolloutState(
            message=[{"role": "user", "content": prompt}],
            prompt_ids=encode(prompt),
            group_id=number,
            rollout_id=f"{number}/{place}",
            response_ids=[],
        )
        for place in range(GROUP_SIZE)
    ]


async def generated(policy: Policy, prompt: str = "14-9=", number: int = 0) -> list[RolloutState]:
    """A completed group."""
    engine = Engine(0, token_seconds=0)
    engine.load(policy, 0)
    return await engine.generate_group(new_group(prompt, number), partial=True)


def tokens_of(group: Sequence[RolloutState]) -> list[list[int]]:
    """The response tokens of each rollout."""
    return [list(rollout.response_ids) for rollout in group]
