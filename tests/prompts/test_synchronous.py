"""Ledgers and samplers of a buffer without `await`, and the examples of docs/prompts.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from replaybuf import PromptLedger, ReplayBufferConfig, RolloutState, Status
from replaybuf.produce import Sampler, SamplerWithReplayBuffer
from replaybuf.sync import run
from tests.pages import Page

PAGE = Page("prompts.md")
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


def test_the_examples_print_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code, output in PAGE.examples:
        PAGE.check(code, output)
