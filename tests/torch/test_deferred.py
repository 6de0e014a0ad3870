"""Deferred fields of batches: ranks load their own part, and no tensor passes between them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from replaybuf import ReplayBufferConfig, load_into
from replaybuf.errors import InputError
from replaybuf.integrations.torch import GroupDataset, leased_steps
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.tasks.handles import ArrayHandle
from tests.torch.conftest import ROOT, Ranks
from tests.torch.groups import TASK, group, totals

SIZE = 300_000  # int16, of each rollout


@pytest.fixture(params=["database", "folder"])
def filled(request: pytest.FixtureRequest, shared_url: str, tmp_path: Path) -> ReplayBufferConfig:
    """Four groups with tensors, whose items are the group's number."""
    payloads = "database" if request.param == "database" else str(tmp_path / "payloads")
    (tmp_path / "payloads").mkdir()
    config = ReplayBufferConfig(url=shared_url, payloads=payloads, policy="fifo")

    async def put() -> None:
        async with config.build() as buffer:
            for number in range(4):
                rollouts = group(number)
                for one in rollouts:
                    one.rollout_id, one.routed_experts = number, torch.full((SIZE,), number, dtype=torch.int16)
                await buffer.put(rollouts, TASK)

    asyncio.run(put())
    return config


#: What each of two ranks has of the groups, in batches of two.
OWN = {
    "split": (0, [[0, 2], [1, 3]]),
    "same": (1, [[0, 1, 2, 3], [0, 1, 2, 3]]),
}


@pytest.mark.parametrize("way", OWN)
def test_each_rank_loads_its_own_part(filled: ReplayBufferConfig, ranks: Ranks, way: str) -> None:
    number, expected = OWN[way]
    said = [rank.end()[0].splitlines() for rank in ranks.start("tensors", number)]
    found = [lines[:-1] for lines in said]
    assert found == [[_line(number) for number in numbers] for numbers in expected]
    assert all(int(lines[-1].removeprefix("sent ")) < SIZE / 10 for lines in said)
    assert (totals(filled)[Tally.TAKEN], totals(filled)[Tally.SIZE]) == (4, 0)


def _line(number: int) -> str:
    return f"{number} {[number * SIZE] * 2}"


def handles(items: list[object]) -> list[object]:
    return items


def test_a_trainer_loads_what_its_worker_has_leased(filled: ReplayBufferConfig) -> None:
    dataset = GroupDataset(filled, {TASK: 2}, collate=handles, timeout=0, deferred=["routed_experts"])
    with leased_steps(DataLoader(dataset, batch_size=None, num_workers=1)) as steps, next(steps) as step:
        assert all(type(one.routed_experts) is ArrayHandle for item in step.batch for one in item.item)
        sums = [int(one.routed_experts.sum()) for item in load_into(step.batch) for one in item.item]
        assert sums == [0, 0, SIZE, SIZE]


def test_a_misspelt_field_is_refused_at_once(filled: ReplayBufferConfig) -> None:
    with pytest.raises(InputError, match="did you mean routed_experts"):
        GroupDataset(filled, {TASK: 1}, deferred=["routed_expert"])


def test_the_example_balances_by_sql_and_each_rank_reads_its_own(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "docs/examples/deferred_ranks.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for number, tokens, size in ((1, 810, 607), (2, 2010, 1507)):
        for rank in range(2):
            assert f"step {number}, rank {rank}: 2 groups, {tokens} tokens, {size} KB" in done.stdout
