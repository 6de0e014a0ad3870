"""Ledgers and samplers of a buffer without `await`."""

from __future__ import annotations

import pytest

from replaybuf import PromptLedger, ReplayBufferConfig, RolloutState, Status
from replaybuf.produce import Sampler, SamplerWithReplayBuffer
from replaybuf.sync import run

DATA = [RolloutState(message=[{"role": "user", "content": str(number)}]) for number in range(3)]


@pytest.mark.parametrize("kind", [PromptLedger, Sampler, SamplerWithReplayBuffer])
def test_a_ledger_takes_a_synchronous_buffer(kind: type[PromptLedger]) -> None:
    with ReplayBufferConfig(url="memory://").build_sync() as buffer:
        ledger = kind(buffer, DATA, "math", epochs=1, **({"make_group": _group} if kind is PromptLedger else {}))
        while drawn := run(ledger.draw(1)):
            for rollout in drawn[0].group:
                rollout.response, rollout.status = "5", Status.COMPLETED
            run(drawn[0].finish())
        assert run(ledger.counts()).finished == buffer.count("math", Status.COMPLETED) == 3
        assert ledger.buffer is buffer.asynchronous


def _group(rollout: RolloutState, number: int) -> list[RolloutState]:
    return [rollout]
