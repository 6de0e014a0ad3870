"""The run of the demo: takes batches, trains, and keeps buffer and weights together.

Any process may be killed at any moment. A step takes its batch, trains, makes a checkpoint of the buffer, and then
saves the weights atomically in one file. At the start, a trainer restores the buffer to the checkpoint of the saved
weights; later work is done again. The numbers of the trained prompts are in the file of the weights, so they are
exactly those that these weights have seen.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from replaybuf import ConfigError, RolloutState
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.cli.demo.policy import Policy
from replaybuf.cli.demo.worker import (
    BATCH_GROUPS,
    NAME,
    STOP,
    TASK,
    Run,
    RunFolder,
    buffer_config,
    main,
    strategy_of,
)
from replaybuf.errors import CheckpointError, NotReadyError, ReplayBufError
from replaybuf.produce import TrainState, publish
from replaybuf.storage.sql.engine.urls import is_memory, parse_url, url_or_path, written
from replaybuf.storage.sql.inspection.group_metadata import buffers_of
from replaybuf.storage.sql.inspection.reader import open_reader

DEFAULT_STEPS = 200
DEFAULT_SECONDS = 60.0  # unless --steps is given

_PATIENCE_SECONDS = 3.0  # time for a worker to end by itself
_LOOK_SECONDS = 0.2  # poll interval for dead workers while waiting for a batch
_BATCH_SECONDS = 60.0
_LINES_PER_RUN = 20


def say(*lines: str) -> None:
    """Print lines, which only a terminal wraps, so that commands in them can be copied."""
    print(*lines, sep="\n", flush=True)


class Workers:
    """The processes of rollout workers. Killed ones are restarted, with a line about each."""

    def __init__(self, url: str, folder: RunFolder, count: int) -> None:
        self._url, self._folder = url, folder
        self._running = {number: self._start(number) for number in range(count)}

    def _start(self, number: int) -> BaseProcess:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=main, args=(self._url, self._folder, number), daemon=True)
        process.start()
        return process

    @property
    def pids(self) -> str:
        """The process ids, by worker."""
        return ", ".join(str(process.pid) for process in self._running.values())

    def restart_killed(self) -> None:
        """Restart killed workers. Raises ReplayBufError for one that ended by itself."""
        for number, process in self._running.items():
            if (code := process.exitcode) is None:
                continue
            if code >= 0:
                raise ReplayBufError(f"worker {number} failed; what it wrote is above")
            successor = self._running[number] = self._start(number)
            cause = f"was killed ({signal.Signals(-code).name})"
            say(f"worker {number} (pid {process.pid}) {cause}; started again as pid {successor.pid}")

    def stop(self) -> None:
        """End the workers, or kill them if that takes too long."""
        for process in self._running.values():
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, STOP)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for process in self._running.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


# How a run begins


def launch(url: str, *, steps: int | None, workers: int) -> None:
    """Run the demo. Raises ReplayBufError."""
    url = url_or_path(url).render_as_string(hide_password=False)
    folder = RunFolder(folder_of(url))

    async def run() -> None:
        async with buffer_config(url, "trainer").build() as buffer:
            state = await begin(buffer, folder, steps or DEFAULT_STEPS)
            await train(url, workers, folder, buffer, state, DEFAULT_SECONDS if steps is None else None)

    try:
        folder.make()
        asyncio.run(run())
    except KeyboardInterrupt:
        say("Stopped. Run the same command again to go on from here.")
        raise


def folder_of(url: str) -> Path:
    """Return the run folder of a database: beside a SQLite file, in the current folder for PostgreSQL."""
    parsed = parse_url(url)
    if is_memory(parsed):
        raise ConfigError("the demo's processes can't share a database in memory: give a file, as in sqlite:///demo.db")
    path = Path(str(parsed.database))
    return (
        path.with_suffix(".run") if parsed.get_backend_name() == "sqlite" else Path(f"replaybuf-demo-{path.name}.run")
    )


async def begin(buffer: ReplayBuffer, folder: RunFolder, steps: int) -> Run:
    """Return the folder's run, with the buffer restored to it, or a new run. Raises ReplayBufError for a mismatch.

    It is to do so many steps, or, after these, as many again.
    """
    run = folder.load()
    if run is None:
        if await buffer.count_where({}) or (await buffer.cursors.read(TASK)).position:
            raise ReplayBufError(
                f"the buffer has groups of a demo run whose weights are not in {folder.path}: give another --url"
            )
        run = Run(Policy.create())
        await buffer.checkpoint(0)  # before any weights, so that a restore is always possible
    try:
        await buffer.restore(run.step)  # fences off another trainer
    except CheckpointError as error:
        raise ReplayBufError(
            f"the weights in {folder.path} are of another buffer than this one ({error}): move them away"
        ) from error
    run.target = steps if run.step < steps else run.step + steps
    drawn_prompts = (await buffer.cursors.read(TASK)).position  # more than are needed, if an earlier target was higher
    run.prompts = max(run.target * BATCH_GROUPS, drawn_prompts)
    folder.save(run)
    return run


# Training


async def train(
    url: str, workers: int, folder: RunFolder, buffer: ReplayBuffer, run: Run, seconds: float | None
) -> None:
    """Train all steps, or as many as fit into `seconds`, and print the result."""
    training = Training(folder, buffer, run)
    argument, has_password = argument_of(url)
    say(training.begins(), f"Buffer: {argument}; weights: {folder.path}", f"Trainer: pid {os.getpid()}")
    processes = Workers(url, folder, workers)
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
    await buffer.checkpoint(run.step)  # includes groups generated since, for a continued run
    with_password = " (with PGPASSWORD)" if has_password else ""
    say(*training.result(), "", f"The weights are in {folder.path}. To look into the run{with_password}:")
    alone = await asyncio.to_thread(open_reader(url).read, buffers_of) == [NAME]
    say(*commands(shlex.quote(argument) + ("" if alone else f" --buffer {NAME}")))


class Training:
    """The trainer's part of a run, and what people see of it."""

    def __init__(self, folder: RunFolder, buffer: ReplayBuffer, run: Run) -> None:
        self.folder, self.buffer, self.run = folder, buffer, run
        self._began_at, self._first_step = time.monotonic(), run.step

    @property
    def seconds(self) -> float:
        """The seconds since this process began to train."""
        return time.monotonic() - self._began_at

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
                        f"the workers gave no batch of {BATCH_GROUPS} groups within {_BATCH_SECONDS:g} s ({error})"
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
        await self.publish(finished=False)
        if step % max(1, run.target // _LINES_PER_RUN) == 0:
            say(f"step {step}/{run.target}: {self.status(groups)}")

    def begins(self) -> str:
        """Return from where the run goes on, and how to begin another, or that it is a new one."""
        run = self.run
        if run.step:
            return f"Resuming at step {run.step} of {run.target}; for a new run, give another --url, such as new.db"
        return f"Training a new policy for {run.target} steps"

    def status(self, groups: Sequence[Sequence[RolloutState]]) -> str:
        """Return the state of the run after a step on these groups, in a line for people."""
        staleness = [max(rollout.seq_staleness for rollout in group) for group in groups]
        return (
            f"reward {self.run.rewards[-1]:.2f}; groups trained {len(self.run.trained):,}; "
            f"staleness {sum(staleness) / len(staleness):.1f} (max {max(staleness)})"
        )

    def result(self) -> list[str]:
        """Return the result of the run, in lines for people."""
        run, summary = self.run, "No step was done."
        if rewards := run.rewards:
            tenth = max(1, len(rewards) // 10)  # of all steps, the first and the last tenth
            summary = f"Mean reward {sum(rewards[:tenth]) / tenth:.2f} -> {sum(rewards[-tenth:]) / tenth:.2f}"
            since_start = f"{run.step - self._first_step} of them now, in " if self._first_step else ""
            summary += f" in {run.step} steps ({since_start}{self.seconds:.0f} s)"
            if run.step < run.target:
                summary += f"; {run.target} are to be done: run it again to go on"
        return ["", summary, verdict(run.trained, run.target * BATCH_GROUPS)]


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


_COMMANDS_TO_TRY = {
    "what the last steps were trained on": "trace {}",
    "whether anybody waits, and why": "why {}",
    "the worst answers": "show {} --worst 3",
    "all of it in a browser (pip install starlette uvicorn jinja2)": "serve {}",
}


def commands(database: str) -> list[str]:
    """Return commands for looking into a run, of a database as a shell reads it, each below its description."""
    examples = {purpose: look.format(database) for purpose, look in _COMMANDS_TO_TRY.items()}
    return [line for purpose, look in examples.items() for line in (f"  # {purpose}", f"  replaybuf {look}")]


def argument_of(url: str) -> tuple[str, bool]:
    """Return the database as an argument of commands, without its password, and whether it had one."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return str(parsed.database), False
    return written(parsed._replace(password=None)), parsed.password is not None
