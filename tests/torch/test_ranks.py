"""Several gloo ranks in processes of their own: disjoint groups, the same batch, and a rank that is killed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.errors import InputError
from replaybuf.integrations.torch import same_steps
from replaybuf.rules.transitions import Tally
from tests.torch.conftest import Ranks, put, settled, totals


def acknowledged(folder: Path) -> Counter[int]:
    """How often each group was trained on and acknowledged, by all ranks together."""
    return Counter(int(line) for file in folder.glob("rank*.txt") for line in file.read_text().split())


def each_once(config: ReplayBufferConfig, folder: Path, count: int) -> bool:
    """By the ranks' own books, and by the store's."""
    books, store = acknowledged(folder), totals(config)
    counts = store[Tally.TAKEN], store[Tally.SIZE], store[Tally.LEASED]
    return books == Counter(range(count)) and counts == (count, 0, 0)


def test_the_other_rank_trains_what_a_killed_one_had(
    shared_config: ReplayBufferConfig, ranks: Ranks, tmp_path: Path
) -> None:
    """Each has a loader of its own; all groups are acknowledged once, those of the killed one after their lease."""
    put(shared_config, 12)
    survivor, victim = ranks.start("each_alone", 1, 11)
    victim.end(-9)
    survivor.end()
    assert each_once(shared_config, tmp_path, 12)
    assert totals(shared_config)[Tally.LEASE_EXPIRED] == 1


@pytest.mark.parametrize("victim", [0, 1], ids=["source", "other"])
def test_a_job_with_split_batches_goes_on_after_a_rank_was_killed(
    shared_config: ReplayBufferConfig, ranks: Ranks, tmp_path: Path, victim: int
) -> None:
    """All of the step comes back, with what was leased in advance; then each group is trained once."""
    put(shared_config, 16)
    job = ranks.start("split", 0, victim, 16)
    job[victim].end(-9)
    job[1 - victim].end(1)
    assert len(acknowledged(tmp_path)) == 4
    for rank in ranks.start("split", 0, -1, 16):
        rank.end()
    assert each_once(shared_config, tmp_path, 16)


@pytest.mark.parametrize("method", [0, 1], ids=["fork", "forkserver"])
def test_workers_of_a_killed_trainer_end_and_all_groups_come_back(
    shared_config: ReplayBufferConfig, ranks: Ranks, method: int
) -> None:
    put(shared_config, 9)  # five batches would be asked for: somebody waits
    [trainer] = ranks.start("hoard", method, size=1)
    workers = {int(word) for word in trainer.line().split()}
    trainer.kill()
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{worker}/stat").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{worker}/stat").exists() for worker in workers)

    async def take() -> int:
        async with shared_config.build() as buffer:
            return len(await buffer.get(9, "math", timeout=60))

    assert asyncio.run(take()) == 9


def test_all_ranks_of_a_group_train_on_the_same_batch(
    shared_config: ReplayBufferConfig, ranks: Ranks, tmp_path: Path
) -> None:
    """One take; acknowledged once, by the source."""
    put(shared_config, 6)
    outputs = [rank.end()[0] for rank in ranks.start("same", 1, 3)]
    assert outputs[0] == outputs[1] != ""
    books = [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    assert books[0] == books[1] == "0\n1\n2\n3\n4\n5\n"
    assert totals(shared_config) == {Tally.PUT: 6, Tally.SAMPLED_NEW: 6, Tally.TAKEN: 6}


@pytest.fixture
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """For what is about ranks and not about stores, a SQLite file will do."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite:///{tmp_path}/buffer.db"
    return str(request.getfixturevalue("postgres_database"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shared_config" in metafunc.fixturenames:
        metafunc.parametrize("shared_url", ["sqlite", "postgresql"], indirect=True)


def test_ranks_pass_the_train_step_on(shared_config: ReplayBufferConfig, ranks: Ranks) -> None:
    """All know it, and the groups of each rank are acknowledged for it."""
    put(shared_config, 8)
    assert [rank.end()[0].split() for rank in ranks.start("counted", 0)] == [["20", "21"]] * 2
    assert settled(shared_config) == {20: 4, 22: 4}


def test_an_error_of_the_source_reaches_all_ranks(ranks: Ranks) -> None:
    own, other = (rank.end()[0] for rank in ranks.start("starved", 0))
    assert own.startswith("NotReadyError the trainer waited for 0.2 s: Nothing is ready for math (0 of 2): ")
    assert "task math: 0 completed groups there, 2 needed" in own
    assert other.startswith(
        "ReplayBufError rank 0, the source of the batches, has no next step: NotReadyError: "
        "the trainer waited for 0.2 s"
    )


def test_a_dead_source_ends_the_wait_for_it(ranks: Ranks) -> None:
    source, other = ranks.start("dead_source", 0)
    source.end(-9)
    output = other.end()[0]
    assert output.startswith("ReplayBufError rank 1 of 2 waited ")
    assert "s for the next step of rank 0, the source of its batches" in output


def test_parts_are_as_many_as_ranks(config: ReplayBufferConfig, ranks: Ranks) -> None:
    put(config, 4)
    own, other = (rank.end()[0] for rank in ranks.start("odd_parts", 0))
    assert own == "InputError split_steps needs batches that are lists of 2 parts, one for each rank\n"
    assert "ReplayBufError rank 0, the source of the batches, has no next step: InputError" in other


def test_ranks_settle_a_step_alike(config: ReplayBufferConfig, ranks: Ranks) -> None:
    """Or it isn't settled; and an error of the source's store is known to all."""
    put(config, 4)
    first, second = (rank.end()[0].splitlines() for rank in ranks.start("differently"))
    unlike = "ReplayBufError the ranks do different things, and nothing was changed: "
    assert first[0] == second[0] == unlike + "rank 0: give back; rank 1: acknowledge"
    assert first[1] == "ReplayBufError the store says no"
    assert second[1].startswith(
        "ReplayBufError other ranks could not acknowledge the step: rank 0: ReplayBufError: the store"
    )


def test_without_ranks_it_says_what_to_call() -> None:
    with pytest.raises(InputError, match=r"call torch\.distributed\.init_process_group first"):
        next(same_steps([]))
