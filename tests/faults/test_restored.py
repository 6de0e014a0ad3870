"""A run that is killed and restored to its last checkpoint is the run that was never killed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.faults.figures import Figures
from tests.faults.ledger import entries, wait_for_lines
from tests.faults.processes import end, start
from tests.faults.runs import POLICIES, STEPS, old_run, train
from tests.stores import build, fill, take_all


def batches(ledger: Path) -> dict[int, str]:
    """The batch of each step."""
    return {int(step): rest for step, _, rest in (line.partition(" ") for line in entries(ledger, "batch"))}


@pytest.mark.parametrize("kills", [1, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_batches_after_a_restore_are_those_of_a_run_that_was_never_killed(
    shared_url: str, tmp_path: Path, policy: str, kills: int, figures: Figures, request: pytest.FixtureRequest
) -> None:
    """From each restored step on, to the last batch and what is left in the end."""
    other_url = f"sqlite:///{tmp_path}/uninterrupted.db"
    whole = tmp_path / "whole"
    assert end(start(train, whole, other_url, policy, None), whole) == 0
    expected, points = batches(whole), len(entries(whole, "point"))
    assert len(expected) == STEPS
    chance = random.Random(policy)
    for number in range(kills + 1):
        ledger = tmp_path / f"{number}"
        # A third of the run on average, so that it gets somewhere between two deaths.
        kill_at = chance.randrange(points // 8, points // 2) if number < kills else None
        died = end(start(train, ledger, shared_url, policy, kill_at), ledger)
        found = batches(ledger)
        wrong = [step for step, batch in found.items() if batch != expected[step]]
        figures.add(faults=int(died != 0), groups=sum(len(batch.split()) for batch in found.values()), lost=len(wrong))
        assert wrong == [], (entries(ledger, "killed"), found, expected)
        if died == 0:
            break
    assert max(found, default=STEPS) == STEPS
    assert entries(ledger, "left") == entries(whole, "left")


def test_who_is_left_of_the_run_before_a_restore_is_fenced_off(
    shared_url: str, tmp_path: Path, figures: Figures
) -> None:
    """Whatever they do next is refused and says so; the restored buffer is that of the checkpoint, and stays so."""
    kinds = ["put", "take", "wait", "lease", "refresh", "checkpoint"]
    ledgers = {kind: tmp_path / kind for kind in kinds}

    async def main() -> list[int]:
        async with build(shared_url) as buffer:
            await fill(buffer, 200)
            await buffer.checkpoint(7)
            old = {
                kind: start(old_run, ledgers[kind], shared_url, kind, 1000 * place + 1000)
                for place, kind in enumerate(kinds)
            }
            for kind in kinds:
                await asyncio.to_thread(wait_for_lines, ledgers[kind], 1 if kind == "wait" else 4)
            await buffer.restore(7)
            for kind in kinds:
                await asyncio.to_thread(end, old[kind], ledgers[kind])
            return await take_all(buffer)

    found = asyncio.run(main())
    for kind in kinds:
        assert "step 7" in entries(ledgers[kind], "fenced")[0], kind
    figures.compare(len(kinds), range(200), found)
    assert found == list(range(200))
