"""The run of the demo: takes batches, trains, and keeps buffer and weights together.

Any process may be killed at any moment. A step takes its batch, trains, makes a checkpoint of the buffer, and then
saves the weights atomically in one file. At the start, a trainer restores the buffer to the checkpoint of the saved
weights; later work is done again. The numbers of the trained prompts are in the file of the weights, so they are
exactly those that these weights have seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from replaybuf import ConfigError, RolloutState, Status
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.cli.demo.policy import Policy
from replaybuf.cli.demo.worker import (
    BATCH_GROUPS,
    TASK,
    Run,
    RunFolder,
    WorkerSettings,
    buffer_config,
    strategy_of,
)
from replaybuf.errors import CheckpointError, NotReadyError, ReplayBufError
from replaybuf.produce import TrainState, publish, published
from replaybuf.produce.prompt_ledger import overwrite
from replaybuf.rules.transitions import Tallies, Tally
from replaybuf.storage.sql.engine.urls import is_memory, parse_url, url_or_path, written

DEFAULT_STEPS = 200
DEFAULT_SECONDS = 60.0  # unless --steps is given

_COMMAND = (sys.executable, "-m", "replaybuf.cli.demo.worker")
_PATIENCE_SECONDS = 3.0  # time for a worker to end by itself
_LOOK_SECONDS = 0.2  # poll interval for dead workers while waiting for a batch
_BATCH_SECONDS = 60.0
_SMOOTHING_STEPS = 20
_LINES = 20  # of a whole run


def say(*lines: str) -> None:
    """Print lines, which only a terminal wraps, so that commands in them can be copied."""
    print(*lines, sep="\n", flush=True)


class Workers:
    """The processes of rollout workers. Killed ones are restarted, with a line about each."""

    def __init__(self, workers: Sequence[WorkerSettings]) -> None:
        self._processes = {settings: self._start(settings) for settings in workers}

    @property
    def pids(self) -> str:
        """The process ids, by worker."""
        return ", ".join(str(process.pid) for process in self._processes.values())

    def _start(self, settings: WorkerSettings) -> subprocess.Popen[bytes]:
        """Start a worker; its output goes to its log. Ctrl-C in the terminal doesn't reach it."""
        with open(_log(settings), "wb") as log:
            process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the worker has ended already; the next poll notices
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.flush()
        return process

    def restart_killed(self) -> None:
        """Restart killed workers. Raises ReplayBufError for one that ended by itself."""
        for settings, process in self._processes.items():
            code, name = process.poll(), f"worker {settings.number}"
            if code is None:
                continue
            if code >= 0:
                lines = _log(settings).read_text("utf-8", "replace").split("\n")
                said = next(filter(None, map(str.strip, reversed(lines))), "it wrote nothing")
                raise ReplayBufError(f"{name} failed: {said} (all that it wrote is in {_log(settings)})")
            _close(process)
            again = self._processes[settings] = self._start(settings)
            how = signal.Signals(-code).name
            say(f"{name} (pid {process.pid}) was killed ({how}); started again as pid {again.pid}")

    def stop(self) -> None:
        """End the workers by closing their stdin, or kill them if that takes too long."""
        for process in self._processes.values():
            _close(process)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _log(settings: WorkerSettings) -> Path:
    return RunFolder(Path(settings.folder)).log(settings.number)


def _close(process: subprocess.Popen[bytes]) -> None:
    with suppress(BrokenPipeError):
        process.stdin.close()  # type: ignore[union-attr]


# How a run begins


def launch(url: str, run_dir: Path | None, *, steps: int | None, workers: int, seed: int | None, fresh: bool) -> bool:
    """Run the demo. Return False if Ctrl-C ended it. Raises ReplayBufError."""
    url = url if url and "://" in url else f"sqlite:///{url_or_path(url).database}"
    folder = RunFolder(run_dir or default_folder(url))

    async def run() -> None:
        async with buffer_config(url, "trainer").build() as buffer:
            if fresh:
                folder.weights.unlink(missing_ok=True)
                await clear(buffer)
            begun = await begin(buffer, folder, seed, steps or DEFAULT_STEPS)
            await train(url, workers, folder, buffer, begun, DEFAULT_SECONDS if steps is None else None)

    try:
        with folder.locked():
            asyncio.run(run())
    except KeyboardInterrupt:
        say("Stopped. Run the same command again to go on from here.")
        return False
    return True


def default_folder(url: str) -> Path:
    """Return the run folder of a database: beside a SQLite file, in the current folder for PostgreSQL."""
    parsed = parse_url(url)
    if is_memory(parsed):
        raise ConfigError("the demo's processes can't share a database in memory: give a file, as in sqlite:///demo.db")
    path = Path(str(parsed.database))
    return (
        path.with_suffix(".run") if parsed.get_backend_name() == "sqlite" else Path(f"replaybuf-demo-{path.name}.run")
    )


async def begin(buffer: ReplayBuffer, folder: RunFolder, seed: int | None, steps: int) -> Run:
    """Return the folder's run, with the buffer restored to it, or a new run. Raises ReplayBufError for a mismatch."""
    run, counted = folder.load(), await buffer.tallies()
    groups = sum(n for (_, _, tally), n in counted.items() if tally in (Tally.SIZE, Tally.LEASED))
    if run is None:
        if groups or (await buffer.cursors.read(TASK)).position:
            raise ReplayBufError(
                f"the buffer has {groups} groups of a demo run whose weights are not in {folder.path}: give its "
                "--run-dir, or start anew with --fresh (removes these groups)"
            )
        run = Run(Policy.create(), seed or 0)
        await buffer.checkpoint(0)  # before any weights, so that a restore is always possible
    elif seed not in (None, run.seed):
        raise ReplayBufError(
            f"the run in {folder.path} was started with seed {run.seed}: go on with --seed {run.seed}, start anew "
            "with --fresh (removes its groups and weights), or give another --url"
        )
    try:
        await buffer.restore(run.step)  # fences off a trainer that started at the same moment, in another folder
    except CheckpointError as error:
        raise ReplayBufError(
            f"the weights in {folder.path} are of another buffer than this one ({error}): give its --url, or start "
            "anew with --fresh (removes the weights and the demo's groups)"
        ) from error
    run.aim(steps)
    drawn = (await buffer.cursors.read(TASK)).position  # more than are needed, if an earlier target was higher
    run.prompts = max(run.target * BATCH_GROUPS, drawn)
    folder.save(run)
    return run


async def clear(buffer: ReplayBuffer) -> None:
    """Remove an earlier run: groups, also leased ones, checkpoints, the position in the prompts, the train state."""
    await buffer.checkpoint(0)
    await buffer.restore(0)  # ends leases, and fences off leftover workers
    await buffer.delete({"task_name": TASK})
    await overwrite(buffer.cursors, TASK, 0, b"")
    if await published(buffer) is not None:
        await publish(buffer, None)
    for made in await buffer.checkpoints():
        await buffer.drop_checkpoint(made.step)


# Training


async def train(
    url: str, workers: int, folder: RunFolder, buffer: ReplayBuffer, run: Run, seconds: float | None
) -> None:
    """Train all steps, or as many as fit into `seconds`, and print the result."""
    training = Training(folder, buffer, run, await buffer.tallies())
    argument, has_password = argument_of(url)
    say(f"Buffer: {argument}; weights: {folder.path}", f"Trainer: pid {os.getpid()}", training.begins())
    processes = Workers([WorkerSettings(url, str(folder.path), number) for number in range(workers)])
    try:
        say(f"Rollout workers: pid {processes.pids} (kill any process, and run this again)")
        await training.publish(finished=False)
        while run.step < run.target and (seconds is None or training.seconds < seconds):
            await training.wait(processes)
            await training.step()
        await training.publish(finished=True)
        await asyncio.to_thread(processes.stop)
    finally:
        processes.stop()
    training.counted = await buffer.tallies()
    if training.buffered:
        await buffer.checkpoint(run.step)  # includes groups generated since, for a continued run
    with_password = " (with PGPASSWORD)" if has_password else ""
    say(*training.result(), "", f"The weights are in {folder.path}. To look into the run{with_password}:")
    say(*commands(argument))
    if run.step >= run.target:
        finish(folder, run)


def finish(folder: RunFolder, run: Run) -> None:
    """Record that the run has reached its target and reported that."""
    run.finished = True
    folder.save(run)


class Training:
    """The trainer's part of a run, and what people see of it: `counted` by the store since the buffer's beginning."""

    def __init__(self, folder: RunFolder, buffer: ReplayBuffer, run: Run, counted: Tallies) -> None:
        self.folder, self.buffer, self.run, self.counted = folder, buffer, run, counted
        self._began, self._first_step, self._staleness = time.monotonic(), run.step, [0]

    @property
    def seconds(self) -> float:
        """The seconds since this process began to train."""
        return time.monotonic() - self._began

    async def publish(self, *, finished: bool) -> None:
        """Publish the saved weights, and the trainer's next step."""
        step = self.run.step
        await publish(self.buffer, TrainState(step + 1, step, str(self.folder.weights), finished))

    async def wait(self, workers: Workers) -> None:
        """Expire the groups that are too old for the next step, and wait until the workers' batch is in the buffer.

        Raises NotReadyError if the workers don't deliver a batch, ReplayBufError if one failed.
        """
        await strategy_of(0).refresh(self.buffer, TASK, self.run.step + 1)
        deadline = time.monotonic() + _BATCH_SECONDS
        while True:
            workers.restart_killed()
            try:
                return await self.buffer.wait_ready({TASK: BATCH_GROUPS}, timeout=_LOOK_SECONDS)
            except NotReadyError as error:
                if time.monotonic() > deadline:
                    raise NotReadyError(
                        f"the workers gave no batch of {BATCH_GROUPS} groups within {_BATCH_SECONDS:g} s ({error}); "
                        f"what they wrote is in {self.folder.log(0)}"
                    ) from error

    async def step(self) -> None:
        """Take a batch and train; then save the buffer, then the weights. Print a line now and then."""
        run, step = self.run, self.run.step + 1
        batch, _ = await self.buffer.take_batch({TASK: BATCH_GROUPS}, timeout=_BATCH_SECONDS, current_train_step=step)
        groups = sorted(batch[TASK], key=_number)  # makes floating-point sums independent of the order of arrival
        run.rewards.append(await asyncio.to_thread(run.policy.train, groups))
        run.trained += map(_number, groups)
        run.step = step
        await self.buffer.checkpoint(step)
        await asyncio.to_thread(self.folder.save, run)
        self._staleness = [max(rollout.seq_staleness for rollout in group) for group in groups]
        self.counted = await self.buffer.tallies()
        await self.publish(finished=False)
        if step % max(1, run.target // _LINES) == 0:
            say(f"step {step}/{run.target}: {self.status()}")

    # For people

    def _count(self, tally: Tally, *statuses: Status) -> int:
        return sum(self.counted.get((TASK, status, tally), 0) for status in statuses or Status)

    @property
    def buffered(self) -> str:
        """The numbers of groups in the buffer by status, without those that were trained."""
        there = {status: self._count(Tally.SIZE, status) for status in sorted(Status) if status != Status.ARCHIVED}
        return ", ".join(f"{number:,} {status}" for status, number in there.items() if number)

    def begins(self) -> str:
        """Return from where the run goes on, or that it is a new one."""
        run = self.run
        if run.step:
            return f"Resuming at step {run.step} of {run.target}; in the buffer: {self.buffered or 'nothing'}"
        return f"Training a new policy for {run.target} steps (seed {run.seed})"

    def status(self) -> str:
        """Return the state of the run in a line for people."""
        recent, stale = self.run.rewards[-_SMOOTHING_STEPS:], self._staleness
        return (
            f"reward {sum(recent) / len(recent):.2f}; groups generated {self._count(Tally.PUT, Status.COMPLETED):,}, "
            f"in the buffer {self.buffered or 'none'}, trained {len(self.run.trained):,}; "
            f"staleness {sum(stale) / len(stale):.1f} (max {max(stale)}), {self._aside()}"
        )

    def _aside(self) -> str:
        expired, interrupted = self._count(Tally.EXPIRED), self._count(Tally.PUT, Status.ABORTED)
        return f"{expired:,} expired, {interrupted:,} interruptions"

    def result(self) -> list[str]:
        """Return the result of the run, in lines for people."""
        run, learned = self.run, "No step was done."
        if rewards := run.rewards:
            tenth = max(1, len(rewards) // 10)  # of all steps, the first and the last tenth
            learned = f"Mean reward {sum(rewards[:tenth]) / tenth:.2f} -> {sum(rewards[-tenth:]) / tenth:.2f}"
            learned += f" in {run.step} steps ({run.step - self._first_step} of them now, in {self.seconds:.0f} s)"
            if run.step < run.target:
                learned += f"; {run.target} are to be done: run it again to go on"
        done = f"Generated {self._count(Tally.PUT, Status.COMPLETED):,} groups, trained on {len(run.trained):,}; "
        return ["", learned, verdict(run.trained, run.target * BATCH_GROUPS), done + self._aside()]


def _number(group: list[RolloutState]) -> int:
    return int(group[0].group_id or 0)


def verdict(trained: Sequence[int], prompts: int) -> str:
    """Return whether each of the prompts, numbered from 0, was trained once."""
    counts = Counter(trained)
    twice = sorted(number for number, count in counts.items() if count > 1)
    if twice:
        return f"{len(twice):,} of {len(counts):,} prompts were trained more than once: number {twice[0]}, for example."
    if counts.keys() == set(range(prompts)):
        return f"Each of the {prompts:,} prompts was trained once."
    return f"{len(counts):,} prompts were trained, each of them once."


_LOOKS = {
    "what the last steps were trained on": "trace {}",
    "whether anybody waits, and why": "why {}",
    "the worst answers": "show {} --worst 3",
    "all of it in a browser (pip install -e '.[web]')": "serve {}",
}


def commands(database: str) -> list[str]:
    """Return commands for looking into a run, each below its description."""
    shown = {what: look.format(shlex.quote(database)) for what, look in _LOOKS.items()}
    return [line for what, look in shown.items() for line in (f"  # {what}", f"  replaybuf {look}")]


def argument_of(url: str) -> tuple[str, bool]:
    """Return the database as an argument of commands, without its password, and whether it had one."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return str(parsed.database), False
    return written(parsed._replace(password=None)), parsed.password is not None
