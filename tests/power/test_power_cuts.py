"""After a power cut at any moment the database, its payloads and its snapshots are as some moment before it had them.

With `durability="full"` it is the moment of the last call that returned, or that of the one under way; with "normal"
perhaps an earlier one. So it is on a disk whose reads, writes and fsyncs fail now and then, where calls that raise are
repeated: an fsync that fails loses what was written before, though the next one succeeds (LWN, "PostgreSQL's fsync()
surprise", 2018).

    python -m pytest tests/power -m long    # 10,000 states
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from replaybuf.cli.doctor import Examination, Severity
from replaybuf.cli.doctor.examine import examine
from replaybuf.storage.places.store import FILES, file_name
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.power.disk import Disk, Event, compiled, recorded
from tests.power.workload import DATABASE, MARKS, PLACE, SAVED, buffer_in, state_of

#: Of a thousand calls of the disk, how many fail.
_FAULTS = 10
#: Of doctor's examinations, one in so many states.
_EXAMINED = 10


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the workload: the events before it began, and before it had returned; what was there then."""

    name: str
    step: int  # of the checkpoint, or the number of the snapshot, if it makes one
    begun: int
    ended: int
    state: Any


@dataclass(frozen=True, slots=True)
class Run:
    """What a process did to its folder. `folders` were there before, by inode; `saved` has the files of snapshots."""

    folder: Path
    folders: Mapping[int, Path]
    durability: str
    events: Sequence[Event]
    calls: Sequence[Call]
    saved: Mapping[str, bytes]

    def allowed(self, event: int) -> list[Any]:
        """Return what may be there after a power cut before this event."""
        ended_count = sum(call.ended <= event for call in self.calls)
        begun_count = sum(call.begun <= event for call in self.calls)
        states = [[[], []], *(call.state for call in self.calls)]
        return states[ended_count if self.durability == "full" else 0 : begun_count + 1]

    def lost_files(self, event: int) -> list[str]:
        """Return the snapshots that were made before this event, and aren't there as they were."""
        saved_folders = [f"{SAVED}{call.step}/" for call in self.calls if call.name == "save" and call.ended <= event]
        return [
            path
            for path, content in self.saved.items()
            if path.startswith(tuple(saved_folders)) and (self.folder / path).read_bytes() != content
        ]


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("the recorder of writes is compiled with gcc")
    return compiled(tmp_path_factory.mktemp("shim"))


@lru_cache(maxsize=2)
def record(shim: Path, seed: int, calls: int, durability: str, **variables: int) -> Run:
    """Run a workload in a process whose writes are recorded, with these variables of the recorder."""
    folder = Path(tempfile.mkdtemp(dir=shim.parent)) / "run"
    (folder / PLACE).mkdir(parents=True)
    folders = {path.stat().st_ino: path for path in (folder, folder / PLACE)}
    log = folder.with_suffix(".log")
    recording = {"LD_PRELOAD": str(shim), "POWER_FOLDER": str(folder), "POWER_LOG": str(log)}
    recording |= {"POWER_SEED": str(seed)} | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-m", "tests.power.workload", str(folder), str(seed), str(calls), durability]
    subprocess.run(command, check=True, env={**os.environ, **recording}, timeout=250)
    events = recorded(log)
    [marks] = [marking.inode for marking in events if marking.op == "c" and marking.path == str(folder / MARKS)]
    ours, calls, last_mark = list[Event](), list[Call](), ("", 0, 0)
    for event in events:
        if event.inode != marks:
            ours.append(event)
        elif event.op == "w":
            kind, *mark = json.loads(event.data)
            if kind == "begin":
                last_mark = (*mark, len(ours))
            elif kind == "end":
                calls.append(Call(*last_mark, len(ours), *mark))
    files = [path for path in folder.glob(f"{SAVED}*/*") if path.is_file()]
    saved = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return Run(folder, folders, durability, ours, calls, saved)


def cuts(run: Run, chance: random.Random, states: int, forgets: str | None = None) -> Iterator[int]:
    """Yield the events before which the power is cut, in their order, with the folder as it is then.

    With syncs that are planted to do nothing, they are after the last call.
    """
    disk, applied = Disk(run.folders, forgets=forgets), 0
    for event in sorted(chance.randint(len(run.events) if forgets else 0, len(run.events)) for _ in range(states)):
        while applied < event:
            disk.apply(run.events[applied])
            applied += 1
        shutil.rmtree(run.folder)
        (run.folder / PLACE).mkdir(parents=True)
        disk.cut(chance)
        yield event


async def wrong_in(run: Run, event: int, chance: random.Random) -> list[str]:
    """Return what is wrong in the folder as it is after a power cut before this event."""
    allowed, full = run.allowed(event), run.durability == "full"
    async with buffer_in(run.folder, "normal") as buffer:
        state = await state_of(buffer, run.folder, may_lose_arrays=not full)
        problems = [] if state in allowed else [f"{state} is none of {allowed}"]
        if full and state[1]:
            step = chance.choice(state[1])
            [checkpoint_call] = [call for call in run.calls if (call.name, call.step) == ("checkpoint", step)]
            await buffer.restore(step)
            restored = [row[:2] for row in (await state_of(buffer, run.folder))[0]]
            if restored != (expected := [row[:2] for row in checkpoint_call.state[0]]):
                problems.append(f"restored to {step}: {restored}, not {expected}")
    if full:
        problems += [f"{path} is gone or cut" for path in run.lost_files(event)]
    return problems


def problems_in(run: Run) -> list[str]:
    """Return what `replaybuf doctor` finds in the folder, and which files of payloads aren't whole."""
    reader = open_reader(f"sqlite:///{run.folder / DATABASE}")
    problems = [f"doctor: {finding}" for finding in examine(Examination(reader)) if finding.level == Severity.PROBLEM]
    for number, size in reader.read(lambda tx: tx.tuples("SELECT id, bytes FROM rb_file WHERE groups > 0")):
        file = run.folder / PLACE / FILES / file_name(number)
        if not file.exists() or file.stat().st_size < size:
            problems.append(f"{file.name} is gone or cut short")
    return problems


def losses(run: Run, chance: random.Random, states: int, forgets: str | None = None) -> Iterator[str]:
    """Yield what is wrong in so many states."""
    for number, event in enumerate(cuts(run, chance, states, forgets)):
        try:
            examined = number % _EXAMINED == 0 and run.durability == "full" and event >= run.calls[0].begun
            problems = problems_in(run) if examined else []
            problems += asyncio.run(wrong_in(run, event, chance))
        except Exception as error:
            problems = [repr(error)]
        yield from (f"before event {event}: {problem}" for problem in problems)


@pytest.mark.parametrize(
    ("durability", "calls", "variables"),
    [("full", 25, {}), ("normal", 25, {}), ("full", 40, {"POWER_FAULTS": _FAULTS})],
    ids=["full", "normal", "on a disk that fails now and then"],
)
@pytest.mark.parametrize(("runs", "states"), [(1, 10), pytest.param(50, 100, marks=pytest.mark.long)])
def test_a_power_cut_leaves_a_moment_of_the_run(
    shim: Path, durability: str, calls: int, variables: dict[str, int], runs: int, states: int
) -> None:
    problems = []
    for seed in range(runs):
        run = record(shim, seed, calls, durability, **variables)
        problems += [f"seed {seed}, {problem}" for problem in losses(run, random.Random(seed), states)]
    assert not problems, "\n".join(problems[:20])


def test_a_sync_that_is_left_out_is_caught(shim: Path) -> None:
    run = record(shim, 0, 25, "full")
    for forgets in ("run.db-wal", "payloads/files/", "payloads/files"):
        assert next(losses(run, random.Random(0), 100, forgets), None), forgets


@pytest.mark.long
def test_a_failed_sync_that_says_that_it_succeeded_is_caught(shim: Path) -> None:
    for seed in range(5):
        run = record(shim, seed, 40, "full", POWER_FAULTS=3 * _FAULTS, POWER_LIES=1)
        if next(losses(run, random.Random(seed), 40), None):
            return
    pytest.fail("no lost group was found")
