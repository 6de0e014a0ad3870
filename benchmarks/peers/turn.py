"""One turn of one peer, in the peer's environment: `python -m benchmarks.peers.turn '{"adapter": …}'` prints JSON."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.adapter import Adapter, Place, make

LONE_PUTS = 50
WAKES = 30
KILLED = 32
#: Before each put of which the latency is measured.
PAUSE_SECONDS = 0.02


def adapter(name: str, place: Place) -> Adapter:
    """Return the adapter "module:Class" of this package."""
    module, class_name = name.split(":")
    peer: Adapter = getattr(importlib.import_module(f"benchmarks.peers.{module}"), class_name)(place)
    return peer


def main() -> None:
    """Run the turn that the JSON of the command line describes."""
    task = json.loads(sys.argv[1])
    result = asyncio.run(_run(task))
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # threads and servers of a peer that don't end must not keep the next one waiting


async def _run(task: dict[str, Any]) -> dict[str, Any]:
    peer = adapter(task["adapter"], Place(task["folder"], task["url"]))
    if task["turn"] in ("wake", "pair") and not peer.shared:
        return {"missing": "for one process only"}
    await peer.open()
    peer.prepare(make(task["size"], task["kind"]))  # it knows what is coming
    try:
        return await TURNS[task["turn"]](peer, task)
    finally:
        await peer.close()


async def _groups(peer: Adapter, task: dict[str, Any]) -> dict[str, Any]:
    """Put and take `count` groups, after a quarter of them as a warm-up, which must come back whole."""
    count = task["count"]
    await _puts_and_takes(peer, task, max(peer.batch, count // 4), check=True)
    return await _puts_and_takes(peer, task, count, check=False) | {"count": count}


async def _puts_and_takes(peer: Adapter, task: dict[str, Any], count: int, *, check: bool) -> dict[str, Any]:
    new_groups = [make(task["size"], task["kind"]) for _ in range(count)]
    tokens = sum(Adapter.tokens(peer, group) for group in new_groups) if check else 0
    prepared = [peer.prepare(group) for group in new_groups]
    batch = peer.batch // 4 if task["size"] == "2M" else peer.batch
    taken_count = 0
    token_sum = 0

    async def put() -> None:
        await peer.put(prepared)
        peer.settle()

    async def take() -> None:
        nonlocal taken_count, token_sum
        while taken_count < count:
            groups = await peer.take(min(batch, count - taken_count))
            if not groups:
                raise RuntimeError(f"{taken_count} of {count} groups were there to take")
            taken_count += len(groups)
            if check:
                token_sum += sum(map(peer.tokens, groups))
        peer.settle()

    del new_groups
    costs = {"put": await _cost(put, task["server"]), "take": await _cost(take, task["server"])}
    if token_sum not in (tokens, 0):
        raise RuntimeError("the groups that were taken are not those that were put")
    return costs


async def _cost(work: Callable[[], Awaitable[None]], server: int | None) -> dict[str, float]:
    """Return seconds, CPU seconds of this process, and those of its children and of the database's server."""
    gc.collect()
    cpu_before = _cpu_of_others(server)
    cpu, start = time.process_time(), time.perf_counter()
    await work()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"seconds": seconds, "cpu": cpu, "server_cpu": _cpu_of_others(server) - cpu_before}


def _cpu_of_others(server: int | None) -> float:
    processes = psutil.Process().children(recursive=True)
    if server:
        root = psutil.Process(server)
        processes += [root, *root.children(recursive=True)]
    return sum(map(_cpu_of, processes))


def _cpu_of(process: psutil.Process) -> float:
    """Return the CPU seconds of all threads of a process: Linux tells nanoseconds, others hundredths of a second."""
    try:
        if sys.platform == "linux":
            threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
            return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
        times = process.cpu_times()
        return float(times.user + times.system)
    except (OSError, psutil.NoSuchProcess):
        return 0.0


async def _lone(peer: Adapter, task: dict[str, Any]) -> dict[str, Any]:
    """Put one group at a time, with a pause before each."""
    latencies = []
    for _ in range(LONE_PUTS + 5):
        prepared = peer.prepare(make(task["size"], task["kind"]))
        await asyncio.sleep(PAUSE_SECONDS)
        start = time.perf_counter()
        await peer.put_one(prepared)
        latencies.append(time.perf_counter() - start)
    return {"latencies": latencies[5:]}


async def _wake(peer: Adapter, task: dict[str, Any]) -> dict[str, Any]:
    """Put while another process waits: from the return of the put until the other one has its group."""
    latencies = []
    with _other_process(_wait, peer, task) as (reports, tell):
        for _ in range(WAKES + 5):
            await asyncio.to_thread(reports.get, timeout=60)
            prepared = peer.prepare(make(task["size"], task["kind"]))
            await asyncio.sleep(0.1)  # by now it waits
            await peer.put_one(prepared)
            put_at = time.time()
            latencies.append(max(0.0, await asyncio.to_thread(reports.get, timeout=60) - put_at))
            tell.put(None)
    return {"latencies": latencies[5:]}


async def _wait(peer: Adapter, _: dict[str, Any], reports: Any, tell: Any) -> None:
    for _turn in range(WAKES + 5):
        reports.put(None)
        await peer.wait_for_one()
        reports.put(time.time())
        await asyncio.to_thread(tell.get, timeout=60)


async def _pair(peer: Adapter, task: dict[str, Any]) -> dict[str, Any]:
    """Take while another process puts: from the moment when both are ready until all are taken."""
    left = task["count"]
    with _other_process(_produce, peer, task) as (told, tell):
        await asyncio.to_thread(told.get, timeout=120)
        tell.put(None)
        start = time.perf_counter()
        while left:
            count = len(await peer.take(min(peer.batch, left))) if await peer.ready(min(peer.batch, left)) else 0
            left -= count
            if not count:
                await asyncio.sleep(0.001)
        seconds = time.perf_counter() - start
    return {"count": task["count"], "seconds": seconds}


async def _produce(peer: Adapter, task: dict[str, Any], reports: Any, tell: Any) -> None:
    prepared = [peer.prepare(make(task["size"], task["kind"])) for _ in range(task["count"])]
    reports.put(None)
    await asyncio.to_thread(tell.get, timeout=120)
    await peer.put(prepared)


@contextlib.contextmanager
def _other_process(work: Any, peer: Adapter, task: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Run `work` in another process on the same place. Yield a queue from it and one to it."""
    context = multiprocessing.get_context("spawn")
    reports, tell = context.Queue(), context.Queue()
    place = Place(task["folder"], task["url"], peer.address)
    process = context.Process(target=_in_other_process, args=(work, task, place, reports, tell), daemon=True)
    process.start()
    try:
        yield reports, tell
        process.join(30)
    finally:
        process.kill()


def _in_other_process(work: Any, task: dict[str, Any], place: Place, reports: Any, tell: Any) -> None:
    async def main() -> None:
        peer = adapter(task["adapter"], place)
        await peer.open()
        peer.prepare(make(task["size"], task["kind"]))
        await work(peer, task, reports, tell)
        await peer.close()

    asyncio.run(main())


async def _kill(peer: Adapter, task: dict[str, Any]) -> dict[str, Any]:
    """Put groups, and end this process and all that it has started, without warning."""
    await peer.put([peer.prepare(make(task["size"], task["kind"])) for _ in range(KILLED)])
    for process in [*psutil.Process().children(recursive=True), psutil.Process()]:
        process.send_signal(signal.SIGKILL)
    raise AssertionError("still alive")


async def _left(peer: Adapter, _: dict[str, Any]) -> dict[str, Any]:
    """Count the groups that can be taken after `kill`."""
    taken_count = 0
    while taken_count < KILLED and await peer.ready(1):
        groups = await peer.take(1)
        if not groups:
            break
        taken_count += len(groups)
    return {"left": taken_count, "of": KILLED}


TURNS = {"groups": _groups, "lone": _lone, "wake": _wake, "pair": _pair, "kill": _kill, "left": _left}

if __name__ == "__main__":
    main()
