"""`python -m benchmarks trees OTHER`: CPU of puts and takes on SQLite, in this checkout and in another one, in turn.

A process of each tree, with the groups of this one, works for some 0.1 s whenever the other rests, so that both meet
the same neighbours and the same speed of the machine. One pair of processes is luckier than another by a tenth (where
its memory lies), so several are made. A put is one of 256 coroutines' with `model_step`, a take has 64 groups.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: What is put in a group, and how many groups a piece of work has.
CASES = {"1:lists": 512, "1:arrays": 512, "100:arrays": 64, "100:lists": 64, "2048:arrays": 64}
_PUTTERS, _BATCH = 256, 64
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


def main(arguments: Sequence[str]) -> int:
    """Print a line for the puts and the takes of each case. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks trees", description=__doc__)
    parser.add_argument("other", type=Path, help="the folder of a checkout")
    parser.add_argument("--case", action="append", choices=CASES, help="KB and kind of values; by default, all")
    parser.add_argument("--processes", type=int, default=5, help="pairs of processes (%(default)s)")
    parser.add_argument("--turns", type=int, default=8, help="of each pair (%(default)s)")
    options = parser.parse_args(arguments)
    here = Path(__file__).parent.parent
    for case in options.case or CASES:
        medians = [_of_pair((options.other.resolve(), here), case, options.turns) for _ in range(options.processes)]
        for place, call in enumerate(("puts", "takes")):
            theirs, ours, ratios = zip(*(pair[place] for pair in medians), strict=True)
            ratio_texts = " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(
                f"{call} of {case}: {statistics.median(theirs):,.0f}, {statistics.median(ours):,.0f} us = "
                f"{statistics.median(ratios):.2f} ({ratio_texts})",
                flush=True,
            )
    return 0


def _of_pair(trees: tuple[Path, Path], case: str, turns: int) -> list[tuple[float, float, float]]:
    """Return for puts and takes the median us of CPU a group in each tree, and the median ratio of the turns."""
    with _running(trees[0], case) as theirs, _running(trees[1], case) as ours:
        processes = theirs, ours
        for tree_process in processes:
            _work(tree_process)
        measured = []
        for turn in range(turns):
            times = {process: _work(process) for process in (processes if turn % 2 == 0 else reversed(processes))}
            measured.append(list(zip(times[theirs], times[ours], strict=True)))
    return [
        (*map(statistics.median, zip(*pairs, strict=True)), statistics.median(mine / other for other, mine in pairs))
        for pairs in zip(*measured, strict=True)
    ]


@contextmanager
def _running(tree: Path, case: str) -> Iterator[subprocess.Popen[str]]:
    """Run this file in a process that imports the package of a tree."""
    process = subprocess.Popen(
        [sys.executable, __file__, case],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.communicate()


def _work(process: subprocess.Popen[str]) -> list[float]:
    """Let a process put and take its groups; return the us of CPU a group of either."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit("a process of the trees has failed")
    return [float(number) for number in answer.split()]


# In a process of either tree: nothing but what both have.


async def _serve(case: str) -> None:
    from replaybuf import ReplayBufferConfig

    with tempfile.TemporaryDirectory(dir=_MEMORY) as folder:
        async with ReplayBufferConfig(url=f"sqlite:///{folder}/a.db").build() as buffer:
            for _ in sys.stdin:
                groups = [_group(case) for _ in range(CASES[case])]
                gc.collect()
                start = time.process_time()
                await _put_all(buffer, groups)
                put_seconds = time.process_time() - start
                del groups
                await asyncio.sleep(0.02)  # what follows the last put
                start = time.process_time()
                for _ in range(0, CASES[case], _BATCH):
                    await buffer.take_batch({"task": _BATCH}, timeout=60)
                took = time.process_time() - start
                print(*(seconds / CASES[case] * 1e6 for seconds in (put_seconds, took)), flush=True)


async def _put_all(buffer: Any, groups: Iterable[Any]) -> None:
    remaining = iter(groups)

    async def put() -> None:
        for group in remaining:
            await buffer.put(group, "task", model_step=97, current_train_step=100)

    await asyncio.gather(*(put() for _ in range(_PUTTERS)))


def _group(case: str) -> list[Any]:
    import fields  # type: ignore[import-not-found]  # of the folder of this file

    from replaybuf import RolloutState, Status

    size, _, kind = case.partition(":")
    if size == "1":
        new_rollouts = fields.small() if kind == "lists" else fields.arrays(1)
    else:
        new_rollouts = fields.lists(int(size)) if kind == "lists" else fields.arrays(int(size))
    return [RolloutState(status=Status.COMPLETED, **rollout_fields) for rollout_fields in new_rollouts]


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
