"""What large runs ask of a buffer: reckoned from published figures, and simulated against the real store.

    python -m benchmarks.large_run                                    # the table of docs/large-runs.md
    python -m benchmarks.large_run --simulate --minutes 60            # arrivals of a run at a tenth of its scale
    python -m benchmarks.large_run --simulate --run agentic --minutes 60 --svg run.svg

The reckoning multiplies; it measures nothing. The simulation is an open loop: groups end when their rollouts would have
ended, by durations with a long tail, whether the store keeps up or not. A trainer takes a batch as soon as it is there,
is busy for as long as a step takes, refreshes staleness and makes a step checkpoint, which it keeps two of.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.databases import TASK, new_database
from benchmarks.plotted import Panel, drawn
from benchmarks.table import percentile
from replaybuf import ReplayBuffer, ReplayBufferConfig, RolloutState, Status

#: Bytes of a token: its id and log-probability (4 each), a mask (1), and some 4 characters of text.
TOKEN_BYTES = 13
#: How often a payload is in the WAL: at the put, and once more when its pages are swept after a checkpoint of the
#: server, with what vacuum writes (measured by the simulation, PostgreSQL 18 with checksums).
WAL_TIMES = 2.3
#: Of a group's row, with its indexes (docs/operating.md).
ROW_BYTES = 1_500
#: Connections of a process that puts one group at a time, and those that it has at most.
USUAL_CONNECTIONS, MOST_CONNECTIONS = 4, 16
#: What the disk keeps: batches ahead of the trainer, and step checkpoints.
BATCHES_KEPT = 6
#: A value and its message have to stay below it (`replaybuf.storage.sql.engine.postgres_dialect.ROW_LIMIT`).
ROW_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it was published. `tokens` is the mean length; `expert_bytes` those of a token's routed experts."""

    name: str
    source: str
    gpus: int
    engines: int  # processes that generate, and put
    groups: int  # of a step
    rollouts: int  # of a group
    tokens: int
    step_seconds: float
    expert_bytes: int = 0
    #: Of a rollout: the mean, and the spread (sigma) of the logarithm.
    rollout_seconds: float = 100.0
    spread: float = 0.6

    @property
    def groups_a_second(self) -> float:
        return self.groups / self.step_seconds

    def group_bytes(self, *, experts: bool) -> int:
        return self.rollouts * self.tokens * (TOKEN_BYTES + (self.expert_bytes if experts else 0))


_NEMO = "NeMo-RL 0.4, docs/about/performance-summary.md"
_VERL = "verl, docs/advance/fully_async.md"
#: Engines: half of the GPUs, which generate, divided by the tensor parallel size of generation.
RUNS = {
    "qwen3-30b": Run("Qwen3-30B-A3B, 1 step off", _NEMO, 32, 8, 64, 32, 3158, 244.0, 48 * 8),
    "qwen3-32b": Run("Qwen3-32B, 1 step off", _NEMO, 64, 8, 64, 32, 3207, 215.0),
    "qwen2.5-7b": Run("Qwen2.5-Math-7B, fully async", _VERL, 128, 64, 512, 16, 28_000, 150.6),
    "qwen3-235b": Run("Qwen3-235B, 1 step off", _NEMO, 256, 16, 16, 32, 5691, 241.0, 94 * 8),
    "deepseek-v3": Run("DeepSeek V3 (671B), 1 step off", _NEMO, 512, 8, 32, 16, 744, 77.9, 58 * 8),
    "agentic": Run(
        "Agentic, 300 s a trajectory", "verl #7579 (durations), slime run-deepseek-r1.sh (batch, longest answer)",
        128, 16, 128, 8, 32_768, 600.0, 58 * 8, 300.0, 1.0,
    ),
}  # fmt: skip


def reckoned(run: Run) -> dict[str, str]:
    """Return what a run asks for, as it is shown."""
    rate, plain, whole = run.groups_a_second, run.group_bytes(experts=False), run.group_bytes(experts=True)
    return {
        "run": run.name,
        "GPUs": str(run.gpus),
        "groups/s": f"{rate:.2f}",
        "a group": _size(plain),
        "with experts": _size(whole) if run.expert_bytes else "-",
        "MB/s": _pair(run, lambda size: f"{rate * size / 1e6:.1f}"),
        "WAL a day": _pair(run, lambda size: _size(86_400 * rate * size * WAL_TIMES)),
        "connections": f"{(run.engines + 1) * USUAL_CONNECTIONS} to {(run.engines + 1) * MOST_CONNECTIONS}",
        "disk": _pair(run, lambda size: _size(BATCHES_KEPT * run.groups * (size + ROW_BYTES))),
        "longest row": f"{ROW_LIMIT / whole:.0f} times as long" if whole < ROW_LIMIT else "over the limit",
    }


def _pair(run: Run, show: Any) -> str:
    plain = str(show(run.group_bytes(experts=False)))
    return f"{plain} / {show(run.group_bytes(experts=True))}" if run.expert_bytes else plain


def _size(count: float) -> str:
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count:.3g} PB"


def table() -> str:
    """Return the reckoning of all runs as Markdown."""
    rows = [reckoned(run) for run in RUNS.values()]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# The simulation


def arrivals(run: Run, scale: float, seed: int) -> Iterator[tuple[float, float]]:
    """Yield when groups are there, in order, each with the time that it took, in seconds.

    As many groups are generated at the same time as give the run's rate, `scale` times. A group takes as long as the
    slowest of its rollouts, and the next one begins in its place at once.
    """
    rng = random.Random(seed)

    def duration() -> float:
        mean = np.log(run.rollout_seconds) - run.spread**2 / 2
        return max(rng.lognormvariate(mean, run.spread) for _ in range(run.rollouts))

    usual = sum(duration() for _ in range(200)) / 200
    slots = max(1, round(scale * run.groups_a_second * usual))
    ends: list[tuple[float, float]] = []
    for _ in range(slots):
        took = duration()
        heapq.heappush(ends, (took * rng.random(), took))  # the run has gone on for a while
    while True:
        end, took = heapq.heappop(ends)
        yield end, took
        following = duration()
        heapq.heappush(ends, (end + following, following))


class Groups:
    """Makes groups of a run, whose arrays are parts of the same two: what is put is what the store is given."""

    def __init__(self, run: Run, *, experts: bool) -> None:
        rng = np.random.default_rng(0)
        self._run = run
        self._ids = rng.integers(0, 150_000, 2 * run.tokens).astype("i4")
        self._logprobs = rng.normal(-1, 0.5, 2 * run.tokens).astype("f4")
        self._width = run.expert_bytes if experts else 0
        self._experts = rng.integers(0, 256, 2 * run.tokens * self._width, dtype="u1")
        self._numbers = itertools.count(1)

    def make(self) -> list[RolloutState]:
        number, run = next(self._numbers), self._run
        return [self._rollout(number, (number + 7919 * n) % run.tokens) for n in range(run.rollouts)]

    def _rollout(self, number: int, start: int) -> RolloutState:
        end = start + self._run.tokens
        more: dict[str, Any] = {}
        if self._width:
            part = self._experts[start * self._width : end * self._width]
            more["routed_experts"] = part.reshape(self._run.tokens, self._width)
        return RolloutState(
            group_id=number,
            message=[{"role": "user", "content": "How long does it travel?"}],
            response="abcd" * self._run.tokens,
            response_ids=self._ids[start:end],
            logprobs=self._logprobs[start:end],
            response_mask=np.ones(self._run.tokens, "i1"),
            reward=float(number % 2),
            status=Status.COMPLETED,
            extra_fields=more,
        )


@dataclass(slots=True)
class Seen:
    """What happened, by seconds since the beginning."""

    arrived: list[float] = field(default_factory=list)
    puts: list[tuple[float, float]] = field(default_factory=list)  # when, and how long the put took
    takes: list[tuple[float, float, float]] = field(default_factory=list)  # when, how long it waited, and took
    checkpoints: list[tuple[float, float]] = field(default_factory=list)
    buffered: list[tuple[float, int]] = field(default_factory=list)
    late: float = 0.0  # the most by which the simulation itself was behind
    wal: int = 0
    staleness: list[int] = field(default_factory=list)


async def simulate(run: Run, kind: str, minutes: float, scale: float, *, experts: bool, payloads: str | None) -> Seen:
    """Drive a new database of a kind by the arrivals of a run for so many minutes."""
    seen, groups, end = Seen(), Groups(run, experts=experts), minutes * 60
    workers = max(1, round(run.engines * scale))
    batch = max(1, round(run.groups * scale))
    async with new_database(kind) as url, AsyncExitStack() as stack:
        options: dict[str, Any] = {"policy": "staleness", "keep_checkpoints": 2}
        if payloads:
            options["payloads"] = payloads
        buffers = [
            await stack.enter_async_context(ReplayBufferConfig(url=url, worker=f"engine {n}", **options).build())
            for n in range(workers)
        ]
        trainer = await stack.enter_async_context(ReplayBufferConfig(url=url, worker="trainer", **options).build())
        await trainer.count(TASK, "completed")
        wal = await _wal(url)
        began, step = time.monotonic(), [1]
        training = asyncio.create_task(_train(trainer, run, batch, seen, began, step))
        counting = asyncio.create_task(_count(trainer, seen, began))
        puts: set[asyncio.Task[None]] = set()
        try:
            for number, (at, _) in enumerate(arrivals(run, scale, 0)):
                if at >= end:
                    break
                await asyncio.sleep(max(0.0, began + at - time.monotonic()))
                seen.late = max(seen.late, time.monotonic() - began - at)
                put = asyncio.create_task(_put(buffers[number % workers], groups.make(), seen, began, step[0]))
                puts.add(put)
                put.add_done_callback(puts.discard)
            await asyncio.sleep(max(0.0, began + end - time.monotonic()))
            if puts:
                await asyncio.wait(puts)
        finally:
            for task in (training, counting):
                task.cancel()
            await asyncio.gather(training, counting, return_exceptions=True)
        seen.wal = await _wal(url) - wal
    return seen


async def _put(buffer: ReplayBuffer, group: list[RolloutState], seen: Seen, began: float, step: int) -> None:
    seen.arrived.append(time.monotonic() - began)
    start = time.monotonic()
    await buffer.put(group, TASK, model_step=step - 1, current_train_step=step)
    seen.puts.append((start - began, time.monotonic() - start))


async def _train(trainer: ReplayBuffer, run: Run, batch: int, seen: Seen, began: float, step: list[int]) -> None:
    while True:
        start = time.monotonic()
        while await trainer.count(TASK, "completed") < batch:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        there = time.monotonic()
        drawn_items = await trainer.sample({TASK: batch}, current_train_step=step[0], timeout=60)
        done = time.monotonic()
        seen.takes.append((there - began, there - start, done - there))
        seen.staleness += [int(item.staleness) for items in drawn_items.values() for item in items]
        await asyncio.sleep(max(0.0, run.step_seconds - (done - start)))
        step[0] += 1
        await trainer.refresh_staleness(task_stale_thresholds={TASK: 8}, current_train_step=step[0])
        start = time.monotonic()
        await trainer.checkpoint(step[0])
        seen.checkpoints.append((start - began, time.monotonic() - start))


async def _count(trainer: ReplayBuffer, seen: Seen, began: float) -> None:
    while True:
        seen.buffered.append((time.monotonic() - began, await trainer.count(TASK, "completed")))
        await asyncio.sleep(1)


async def _wal(url: str) -> int:
    """Return the place in the server's WAL; 0 on SQLite."""
    if url.startswith("sqlite"):
        return 0
    async with _connected(url) as connection:
        return int(await connection.fetchval("SELECT pg_current_wal_lsn() - '0/0'"))


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Any]:
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


def told(run: Run, scale: float, minutes: float, seen: Seen) -> str:
    """Return what was seen, in some lines."""
    puts = [seconds for _, seconds in seen.puts]
    lines = [
        f"{run.name}, scale {scale:g}, {minutes:g} minutes: {len(puts)} groups put "
        f"({len(puts) / minutes / 60:.2f}/s), {len(seen.takes)} train steps",
        f"put: p50 {_ms(puts, 50)}, p99 {_ms(puts, 99)}, longest {_ms(puts, 100)}",
        f"draw of a batch that is there: p50 {_ms([call for *_, call in seen.takes], 50)}, longest "
        f"{_ms([call for *_, call in seen.takes], 100)}; step checkpoint: longest "
        f"{_ms([took for _, took in seen.checkpoints], 100)}",
        f"buffered at most {max((n for _, n in seen.buffered), default=0)} groups; staleness at the draw: mean "
        f"{sum(seen.staleness) / max(1, len(seen.staleness)):.1f}, most {max(seen.staleness, default=0)}",
        f"the simulation was behind by {seen.late * 1000:.0f} ms at most",
    ]
    if seen.wal and puts:
        lines.append(f"WAL: {_size(seen.wal)}, {_size(seen.wal / len(puts))} a group")
    return "\n".join(lines)


def _ms(seconds: Sequence[float], share: int) -> str:
    if not seconds:
        return "-"
    found = percentile(list(seconds), share) if share < 100 and len(seconds) > 1 else max(seconds)
    return f"{found * 1000:.0f} ms"


def picture(run: Run, scale: float, minutes: float, seen: Seen) -> str:
    """Return a plot of arrivals, buffered groups and the time of puts, as SVG."""
    width = max(1.0, minutes * 60 / 60)
    bins = [(n + 0.5) * width for n in range(60)]
    arrived = [sum(1 for at in seen.arrived if n * width <= at < (n + 1) * width) / width for n in range(60)]
    return drawn(
        f"{run.name}, scale {scale:g}: arrivals of an open loop against the store",
        minutes * 60,
        [
            Panel("groups that arrive, per second", list(zip(bins, arrived, strict=True)), steps=True),
            Panel("groups buffered; a line for each draw of a batch", [(at, float(n)) for at, n in seen.buffered]),
            Panel("milliseconds of each put", [(at, took * 1000) for at, took in seen.puts], dots=True),
        ],
        marks=[at for at, *_ in seen.takes],
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_run", description=__doc__)
    parser.add_argument("--simulate", action="store_true", help="drive the store, instead of printing the table")
    parser.add_argument("--run", choices=RUNS, default="agentic")
    parser.add_argument("--scale", type=float, default=0.1, help="of the run's arrivals, batch and engines")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--db", choices=["sqlite", "postgresql"], default="postgresql")
    parser.add_argument("--experts", action="store_true", help="with the routed experts of every token")
    parser.add_argument("--payloads", help="a folder to keep payloads apart in")
    parser.add_argument("--svg", type=Path, help="the file of the picture")
    given = parser.parse_args()
    if not given.simulate:
        print(table())
        return
    run = RUNS[given.run]
    work = simulate(run, given.db, given.minutes, given.scale, experts=given.experts, payloads=given.payloads)
    seen = asyncio.run(work)
    print(told(run, given.scale, given.minutes, seen))
    if given.svg:
        given.svg.write_text(picture(run, given.scale, given.minutes, seen))


if __name__ == "__main__":
    main()
