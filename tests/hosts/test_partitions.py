"""Workers and trainers on hosts of their own, with delay, loss, partitions and clocks that are hours apart.

Whatever the network does, each group that was put reaches one trainer, once, and everybody goes on without an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.conftest import Figures
from tests.faults.processes import Ledger
from tests.histories.history import Recorder, calls_in, numbers_of_calls
from tests.histories.workers import take_all_left
from tests.hosts.cable import Host
from tests.hosts.conftest import Process
from tests.hosts.roles import EACH
from tests.postgres import ask
from tests.stores import build

LONG = pytest.mark.long
Start = Callable[..., Process]
#: How long a partition lasts: shorter and longer than both sides wait for each other (`thread.SILENCE_SECONDS`).
SECONDS = (10, 60)
HOURS = 3600.0
#: The calls by which trainers in a role get groups for good.
GETS = {"take": "take", "lease": "acknowledge"}


@pytest.fixture
def start(database: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a process of `roles` on a host; it is killed if the test fails."""
    with ExitStack() as ending:

        def begin(host: Host, role: str, **settings: float) -> Process:
            process = Process(host, role, database, tmp_path, **settings)  # type: ignore[arg-type]
            ending.callback(process.kill)
            return process

        yield begin


async def settle(
    workers: list[Process], trainers: list[Process], url: str, figures: Figures, faults: int = 0
) -> list[int]:
    """End all, take what is left, and judge what they called; return what was put."""
    for process in (*workers, *trainers):
        await process.end()
    ledgers = [process.log for process in (*workers, *trainers)]
    ledgers.append(ledgers[0].with_name("drain"))
    async with build(url, max_deliveries=0) as buffer:
        await take_all_left(buffer, Recorder(Ledger(ledgers[-1])))
    calls = calls_in(ledgers)
    figures.judge(faults, calls)
    return numbers_of_calls(calls, "put")


async def clients(url: str, host: Host) -> int:
    """Return how many connections the server has from a host."""
    return len(await ask(url, f"SELECT pid FROM pg_stat_activity WHERE client_addr = '{host.address}'"))


@pytest.mark.parametrize(
    ("silence", "seconds"), [(5, 1), *(pytest.param(*case, marks=LONG) for case in ((2, 6), (20, 3), (20, 45)))]
)
async def test_a_cut_cable_loses_and_doubles_nothing(
    two_hosts: list[Host], start: Start, database: str, figures: Figures, silence: int, seconds: int
) -> None:
    """Each side gives a connection up after `silence` seconds: a longer cut ends it, a shorter one only stops it.

    (Between a quarter of it and all of it either may happen: it depends on when TCP tries again.)
    """
    host, _ = two_hosts
    worker = start(host, "call", silence=silence)
    await worker.goes_on("put", 30)
    assert await clients(database, host) > 0
    host.cut()
    await asyncio.sleep(seconds)
    if seconds > 2 * silence:
        assert await clients(database, host) == 0
    host.mend()
    await worker.goes_on("put", 60)
    await worker.goes_on("take", 60)
    await settle([worker], [], database, figures, 1)


@LONG
@pytest.mark.parametrize("round_trip", [0.002, 0.032, 0.064])
@pytest.mark.parametrize("role", ["take", "lease"])
async def test_delay_and_loss_lose_and_double_nothing(
    two_hosts: list[Host], start: Start, database: str, figures: Figures, role: str, round_trip: float
) -> None:
    for host in two_hosts:
        host.set(delay=round_trip / 2, loss=0.01)
    worker, trainer = start(two_hosts[0], "put"), start(two_hosts[1], role)
    await worker.goes_on("put", 120, more=60)
    await trainer.goes_on(GETS[role], 120, more=40)
    await settle([worker], [trainer], database, figures)


@LONG
@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("side", ["worker", "trainer"])
@pytest.mark.parametrize("way", ["both", "there", "back"])
async def test_a_partition_loses_and_doubles_nothing(
    two_hosts: list[Host], start: Start, database: str, figures: Figures, side: str, way: str, seconds: int
) -> None:
    """One side, or only what it sends, or only what it is sent, doesn't arrive for a time; then both go on."""
    worker, trainer = start(two_hosts[0], "put"), start(two_hosts[1], "take")
    await worker.goes_on("put", 60)
    await trainer.goes_on("take", 60)
    cable, other = (two_hosts[0], trainer) if side == "worker" else (two_hosts[1], worker)
    cable.set(there=way == "back", back=way == "there")
    before = len(other.done("put"))
    await asyncio.sleep(seconds)
    if side == "trainer":
        assert len(other.done("put")) > before + 2 * seconds  # nobody waits for who is cut off
    cable.mend()
    await worker.goes_on("put", 60)
    await trainer.goes_on("take", 60)
    await settle([worker], [trainer], database, figures, 1)


@LONG
@pytest.mark.parametrize("seconds", SECONDS)
async def test_leases_of_a_host_that_is_cut_off_go_to_another(
    two_hosts: list[Host], start: Start, database: str, figures: Figures, seconds: int
) -> None:
    """A lease runs out whose holder isn't heard of; a late acknowledgement is refused: each group counts once."""
    near_host, far_host = two_hosts
    worker, near, far = start(near_host, "put"), start(near_host, "lease", number=1), start(far_host, "lease", number=2)
    await far.goes_on("acknowledge", 60)
    far_host.cut()
    await asyncio.sleep(seconds)
    await near.goes_on("acknowledge", 30)
    far_host.mend()
    await far.goes_on("acknowledge", 90)
    await settle([worker], [near, far], database, figures, 1)


@LONG
@pytest.mark.parametrize("role", ["take", "lease"])
async def test_clocks_that_are_hours_apart_lose_and_double_nothing(
    two_hosts: list[Host], start: Start, database: str, figures: Figures, role: str
) -> None:
    """Nor with a partition; nobody takes another for dead, or sweeps what is needed, because of a clock."""
    near_host, far_host = two_hosts
    for host in two_hosts:
        host.set(delay=0.002)
    ahead, behind = (start(near_host, "put", ahead=3 * HOURS), start(far_host, "put", ahead=-3 * HOURS, number=1))
    trainers = [
        start(near_host, role, ahead=-5 * HOURS, number=2),
        start(far_host, role, ahead=5 * HOURS, number=3),
    ]
    for trainer in trainers:
        await trainer.goes_on(GETS[role], 60, more=100)
    far_host.cut()
    await asyncio.sleep(12)
    far_host.mend()
    for trainer in trainers:
        await trainer.goes_on(GETS[role], 90)
    put_numbers = await settle([ahead, behind], trainers, database, figures, 1)
    assert {number // EACH for number in put_numbers} == {0, 1}
