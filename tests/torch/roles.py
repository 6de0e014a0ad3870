"""What ranks do in tests, with the arguments ROLE URL FOLDER MEETING RANK SIZE ...

Each writes the numbers of the groups that
it has acknowledged into a file of its own, a line each.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from replaybuf import ReplayBufferConfig, load_into
from replaybuf.errors import ReplayBufError
from replaybuf.integrations.torch import GroupDataset, Step, largest, leased_steps, same_steps, split_steps
from replaybuf.integrations.torch.ranks import Link, RankStep
from tests.torch.conftest import TASK, numbers

LEASE_SECONDS = 4.0

# How workers are started
STARTS = ("fork", "forkserver")

# For what takes seconds on an idle machine.
WAIT = 180.0


def loader(url: str, size: int = 2, wait: float = WAIT, workers: int = 0, collate: Any = numbers) -> DataLoader[Any]:
    config = ReplayBufferConfig(url=url, policy="fifo")
    dataset = GroupDataset(config, {TASK: size}, collate=collate, timeout=wait, seconds=LEASE_SECONDS)
    return DataLoader(dataset, batch_size=None, num_workers=workers, in_order=workers < 2)


def note(folder: Path, name: str, batch: Iterable[int]) -> None:
    with (folder / f"{name}.txt").open("a") as file:
        file.writelines(f"{number}\n" for number in batch)


def train(batch: list[int]) -> float:
    """A train step in which ranks need each other, as for their gradients."""
    gradient = torch.tensor([float(len(batch))])
    dist.all_reduce(gradient)
    return float(gradient)


def say(*words: object) -> None:
    print(*words, flush=True)


def hoard(url: str, folder: Path, method: int) -> None:
    """A trainer that never ends its first step, while its workers lease in advance, and then wait for more."""
    config = ReplayBufferConfig(url=url, policy="fifo")
    dataset = GroupDataset(config, {TASK: 2}, collate=pid, timeout=600, seconds=LEASE_SECONDS)
    start: Any = STARTS[method]
    batches = DataLoader(dataset, batch_size=None, num_workers=2, in_order=False, multiprocessing_context=start)
    with leased_steps(batches) as steps:
        say(next(steps).batch, next(steps).batch)
        time.sleep(600)


def pid(items: list[Any]) -> int:
    return os.getpid()


def split(url: str, folder: Path, source: int, victim: int, until: int) -> None:
    """Train on batches that the source leases for both, in advance, until so many groups are trained.

    The victim dies in the middle of its 2nd step.
    """
    with given(source, loader(url, size=4, workers=2, collate=halves)) as steps:
        train_until(split_steps(steps, source=source), folder, victim, until)


def halves(items: list[Any]) -> list[list[int]]:
    return [numbers(items[0::2]), numbers(items[1::2])]


def train_until(steps: Iterable[RankStep], folder: Path, victim: int, until: int) -> None:
    for number, step in enumerate(steps, 1):
        if dist.get_rank() == victim and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        train(step.batch)
        step.acknowledge()
        note(folder, f"rank{dist.get_rank()}-{os.getpid()}", step.batch)
        if trained_by_all(folder) >= until:
            break


def trained_by_all(folder: Path) -> int:
    """The number of groups trained so far, the same on all ranks."""
    dist.barrier()
    return largest(sum(len(file.read_text().split()) for file in folder.glob("rank*.txt")))


def each_alone(url: str, folder: Path, victim: int, until: int) -> None:
    """Ranks with a loader each, on their own; the victim dies in the middle of its 2nd step."""
    rank, name = dist.get_rank(), f"rank{dist.get_rank()}"
    trained = 0
    with leased_steps(loader(url, size=1)) as steps:
        while trained < until:
            step = next(steps)
            if trained == 1:
                dist.barrier()  # both have their second batch
                if rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
            step.acknowledge()
            note(folder, name, step.batch)
            trained += len(step.batch)
    say("trained", trained)


def same(url: str, folder: Path, source: int, count: int) -> None:
    """Tensor-parallel: all ranks train on the same batches."""
    with given(source, loader(url)) as steps:
        for step in same_steps(steps, source=source):
            with step:
                train(step.batch)
                uids = [item.uid for item in step.items[TASK]]
            note(folder, f"rank{dist.get_rank()}", step.batch)
            say(*uids)
            count -= 1
            if not count:
                break


def given(
    source: int, batches: DataLoader[Any], train_step: int | None = None
) -> AbstractContextManager[Iterable[Step] | None]:
    """The source's steps; None on other ranks."""
    return leased_steps(batches, train_step=train_step) if dist.get_rank() == source else nullcontext()


def say_why_no_step(url: str, source: int, **options: Any) -> None:
    with given(source, loader(url, **options)) as steps:
        try:
            next(same_steps(steps, source=source))
        except Exception as error:
            say(type(error).__name__, str(error).replace("\n", " "))


def starved(url: str, folder: Path, source: int) -> None:
    """The source has no batch in time: all ranks get an error."""
    say_why_no_step(url, source, wait=0.2)


def dead_source(url: str, folder: Path, source: int) -> None:
    """The source dies while the others wait for its batch."""
    if dist.get_rank() == source:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    say_why_no_step(url, source)


def odd_parts(url: str, folder: Path, source: int) -> None:
    """The source's batch has three parts for two ranks."""
    with given(source, loader(url, size=3)) as steps:
        try:
            next(split_steps(steps, source=source))
        except ReplayBufError as error:
            say(type(error).__name__, error)


def differently(url: str, folder: Path) -> None:
    """One rank acknowledges a step, and the other gives it back; then the source's store refuses."""
    with given(0, loader(url)) as steps:
        step = next(same_steps(steps))
        try:
            step.acknowledge() if dist.get_rank() else step.give_back()
        except ReplayBufError as error:
            say(type(error).__name__, error)
        if not dist.get_rank():
            step._step.asynchronous.storage.acknowledge = _lost  # type: ignore[union-attr,method-assign]
        try:
            step.acknowledge()
        except Exception as error:
            say(type(error).__name__, error)


def counted(url: str, folder: Path, source: int) -> None:
    """Two batches of both ranks, made by a worker; all ranks say their train steps."""
    with given(source, loader(url, size=4, workers=1, collate=halves), train_step=20) as steps:
        for step in itertools.islice(split_steps(steps, source=source), 2):
            say(step.train_step)
            step.acknowledge(train_step=22 if step.train_step == 21 else None)


async def _lost(*_: object) -> None:
    raise ReplayBufError("the store says no")


def tensors(url: str, folder: Path, ways: int) -> None:
    """Load one's own part of batches with deferred fields; say how much was sent, and what was loaded."""
    sent_sizes: list[int] = []

    def counted(send: Any) -> Any:
        def call(link: Link, message: Any, *rest: Any) -> Any:
            sent_sizes.append(len(pickle.dumps(message)))
            return send(link, message, *rest)

        return call

    Link.broadcast, Link.gather = counted(Link.broadcast), counted(Link.gather)  # type: ignore[method-assign]
    config = ReplayBufferConfig(url=url, policy="fifo")
    way, collate = [(split_steps, in_two), (same_steps, list)][ways]
    dataset = GroupDataset(config, {TASK: 2}, collate=collate, timeout=0, deferred=["routed_experts"])
    batches = DataLoader(dataset, batch_size=None, num_workers=1 if way is split_steps else 0)
    with nullcontext() if dist.get_rank() else leased_steps(batches) as own_batches:
        for step in way(own_batches):
            with step:
                for item in load_into(step.batch):
                    say(item.item[0].rollout_id, [int(rollout.routed_experts.sum()) for rollout in item.item])
    say("sent", max(sent_sizes))


def in_two(items: list[Any]) -> list[list[Any]]:
    return [items[::2], items[1::2]]


ROLES = {
    role.__name__: role
    for role in (
        *(split, hoard, each_alone, same, starved),
        *(dead_source, odd_parts, differently, counted, tensors),
    )
}


def main(arguments: list[str]) -> None:
    role, url, folder, meeting, *rest = arguments
    patience = timedelta(seconds=WAIT)
    rank, size, *rest = rest
    address = f"file://{meeting}"
    dist.init_process_group("gloo", init_method=address, rank=int(rank), world_size=int(size), timeout=patience)
    try:
        ROLES[role](url, Path(folder), *map(int, rest))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
