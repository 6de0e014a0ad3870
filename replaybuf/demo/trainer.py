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
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from sqlalchemy.engine import make_url

from replaybuf import ConfigError, RolloutState
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.demo import Mode
from replaybuf.demo.display import Display, Figures, commands, result
from replaybuf.demo.policy import Policy
from replaybuf.demo.run_folder import (
    BATCH_GROUPS,
    TASK,
    Run,
    RunFolder,
    buffer_config,
    made_place,
    sampler_of,
    strategy_of,
    worker_strategy,
)
from replaybuf.demo.worker import Engine, WorkerSettings
from replaybuf.errors import CheckpointError, NotReadyError, ReplayBufError, UnreachableError
from replaybuf.places.owners import IN_DATABASE
from replaybuf.produce import Sampler, TrainState, publish, published
from replaybuf.produce.prompt_ledger import overwrite
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.urls import hosts_as_options, is_memory, parse_url, url_or_path, written
from replaybuf.storage.sql.inspection.reader import open_reader

DEFAULT_STEPS = 200
DEFAULT_SECONDS = 60.0  # unless --steps is given
OWNER = "replaybuf:demo"  # the cursor that marks a database as the demo's own

_COMMAND = (sys.executable, "-m", "replaybuf.demo.worker")
_PATIENCE_SECONDS = 3.0  # time for a worker to end by itself
_LOOK_SECONDS = 0.2  # poll interval for dead workers while waiting for a batch
_BATCH_SECONDS = 60.0


class Workers:
    """The processes of rollout workers. Killed ones are restarted; `say` is called with a line about each."""

    def __init__(self, workers: Sequence[WorkerSettings], say: Callable[[str], None]) -> None:
        self._say = say
        self._processes = {settings: self._start(settings) for settings in workers}

    @property
    def pids(self) -> list[int]:
        """The process ids, by worker."""
        return [process.pid for process in self._processes.values()]

    def _start(self, settings: WorkerSettings) -> subprocess.Popen[bytes]:
        """Start a worker; its output goes to its log. Ctrl-C in the terminal doesn't reach it."""
        with open(_log(settings), "wb") as log:
            process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the worker has ended already; the next poll notices
            process.stdin.write(json.dumps(asdict(settings)).encode() + b"\n")
            process.stdin.flush()
        return process

    def restart_killed(self) -> None:
        """Restart killed workers. Raises ReplayBufError for one that ended by itself."""
        for settings, process in self._processes.items():
            code, name = process.poll(), f"worker {settings.worker}"
            if code is None:
                continue
            if code >= 0:
                lines = [line.strip() for line in _log(settings).read_text("utf-8", "replace").split("\n")]
                said = next(filter(None, reversed(lines)), "it wrote nothing")
                raise ReplayBufError(f"{name} failed: {said} (all that it wrote is in {_log(settings)})")
            _close(process)
            again = self._processes[settings] = self._start(settings)
            how = signal.Signals(-code).name
            self._say(f"{name} (pid {process.pid}) was killed ({how}); started again as pid {again.pid}")

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
    return RunFolder(Path(settings.folder)).log(settings.worker)


def _close(process: subprocess.Popen[bytes]) -> None:
    with suppress(BrokenPipeError):
        process.stdin.close()  # type: ignore[union-attr]


def launch(
    url: str,
    run_dir: Path | None,
    *,
    mode: Mode,
    steps: int | None,
    workers: int,
    seed: int | None,
    fresh: bool,
    payloads: str = IN_DATABASE,
) -> bool:
    """Run the demo. Return False if Ctrl-C ended it. Raises ReplayBufError."""
    payloads = made_place(payloads)
    url = url if url and "://" in url else f"sqlite:///{url_or_path(url).database}"
    folder, display = RunFolder(run_dir or default_folder(url)), Display(Console(highlight=False))

    async def run() -> None:
        async with buffer_config(url, "trainer", payloads).build() as buffer:
            await overwrite(buffer.cursors, OWNER, 1, b"")
            if fresh:
                folder.clear()
                await clear(buffer)
            begun = await begin(buffer, folder, seed, steps or DEFAULT_STEPS)
            training = Training(url, mode, workers, folder, buffer, display, begun, payloads)
            await training.run(DEFAULT_SECONDS if steps is None else None)

    check_owner(url)
    try:
        with folder.locked():
            asyncio.run(run())
    except KeyboardInterrupt:
        display.say("Stopped. Run the same command again to go on from here.")
        return False
    return True


#: Buffers and tasks of others. In the demo's own database, a restore takes back all tasks of the demo's buffer.
_OTHERS = """
SELECT DISTINCT buffer || ': ' || task_name AS name FROM rb_lane
WHERE NOT EXISTS (SELECT 1 FROM rb_cursor WHERE name = :owner) OR (buffer = 'default' AND task_name <> :task)
ORDER BY name"""


def check_owner(url: str) -> None:
    """Raise ReplayBufError unless the database is empty, or the demo's own."""
    with suppress(UnreachableError):  # a file that isn't there; a server that is away says so when the buffer is opened
        reader = open_reader(url)
        if reader.read_any(lambda tx: tx.revision()) is None:
            return
        if names := reader.read(lambda tx: tx.values(_OTHERS, owner=OWNER, task=TASK)):
            raise ReplayBufError(
                f"{reader.where} has groups of others ({', '.join(names):.200}), and the demo uses only an empty "
                "database or its own: give another --url"
            )


def default_folder(url: str) -> Path:
    """Return the run folder of a database: beside a SQLite file, in the current folder for PostgreSQL."""
    parsed = parse_url(url)
    if is_memory(parsed):
        raise ConfigError("the demo's processes can't share a database in memory: give a file, as in sqlite:///demo.db")
    path = Path(str(parsed.database))
    return (
        path.with_suffix(".run") if parsed.get_backend_name() == "sqlite" else Path(f"replaybuf-demo-{path.name}.run")
    )


def argument_of(url: str) -> tuple[str, bool]:
    """Return the database as an argument of commands, without its password, and whether it had one."""
    parsed = parse_url(url)  # refuses unsupported URLs, without showing a password
    if parsed.get_backend_name() == "sqlite":
        return str(parsed.database), False
    given = make_url(hosts_as_options(url))
    shown = given.set(drivername="postgresql")._replace(password=None).difference_update_query(["password", "passwd"])
    return written(shown), bool(given.password or given.query.get("password"))


async def begin(buffer: ReplayBuffer, folder: RunFolder, seed: int | None, steps: int) -> Run:
    """Return the folder's run, with the buffer restored to it, or a new run. Raises ReplayBufError for a mismatch."""
    counted, run = await buffer.tallies(), folder.load()
    groups = sum(n for (_, _, tally), n in counted.items() if tally in (Tally.SIZE, Tally.LEASED))
    if run is None:
        if groups or (await buffer.cursors.read(TASK)).position:
            raise ReplayBufError(
                f"the buffer has {groups} groups of a demo run whose weights are not in {folder.path}: give its "
                "--run-dir, or start anew with --fresh (removes these groups)"
            )
        run = Run(Policy.create(), seed or 0)
        run.aim(steps)
        await buffer.checkpoint(0)  # before any weights, so that a restore is always possible
        folder.save(run)
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
    if run.aim(steps):
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


@dataclass
class Training:
    """The trainer's part of a run, from `saved` on."""

    url: str
    mode: Mode
    workers: int
    folder: RunFolder
    buffer: ReplayBuffer
    display: Display
    saved: Run
    payloads: str = IN_DATABASE

    def __post_init__(self) -> None:
        apart = self.payloads != IN_DATABASE  # arrays are kept outside the database
        self.first_step, self.strategy = self.saved.step, strategy_of(self.mode)
        self.engine = Engine(self.saved.seed, with_experts=apart)
        self.shown, self.has_password = argument_of(self.url)
        self.looks = commands(self.shown, apart=apart)

    async def run(self, seconds: float | None) -> None:
        """Train all steps, or as many as fit into `seconds`, and print the result."""
        saved, display, started = self.saved, self.display, time.monotonic()
        counted = await self.buffer.tallies()
        self.figures = figures = Figures(counted, counted)
        self.greet()
        drawn = (await self.buffer.cursors.read(TASK)).position
        prompts = max(saved.target * BATCH_GROUPS, drawn)  # more were drawn if an earlier target was higher
        sampler = sampler_of(self.buffer, saved.seed, prompts)
        first = WorkerSettings(self.url, str(self.folder.path), 0, saved.seed, prompts, self.payloads)
        number = self.workers if self.mode == Mode.DISAGGREGATED else 0
        workers = Workers([replace(first, worker=i) for i in range(number)], display.say)
        try:
            if number and not display.console.is_terminal:
                display.say(f"Rollout workers: pid {', '.join(map(str, workers.pids))}")
            await self._publish(finished=False)
            with display.showing(saved, figures, lambda: workers.pids):
                while saved.step < saved.target and (seconds is None or time.monotonic() - started < seconds):
                    await (self._wait(workers) if number else self._produce(sampler))
                    await self._train()
                    display.update(saved, figures)
                await self._publish(finished=True)
                await asyncio.to_thread(workers.stop)
                figures.now = await self.buffer.tallies()
        finally:
            workers.stop()
        if any(figures.buffered.values()):
            await self.buffer.checkpoint(saved.step)  # includes groups generated since, for a continued run
        display.say(*result(saved, figures, self.first_step, time.monotonic() - started), "")
        password = " (with PGPASSWORD)" if self.has_password else ""
        display.say(f"The weights are in {self.folder.path}. To look into the run{password}:", *self.looks)
        if saved.step >= saved.target:
            self.folder.finish(saved)

    def greet(self) -> None:
        """Print the mode, the database and the steps of the run."""
        saved, arrays = self.saved, "" if self.payloads == IN_DATABASE else f"; arrays: {self.payloads}"
        begins = f"Training a new policy for {saved.target} steps (seed {saved.seed})"
        if saved.step:
            groups = sum(self.figures.buffered.values())
            begins = f"Resuming at step {saved.step} of {saved.target} with {groups} groups in the buffer"
        database = f"Buffer: {self.shown}; weights: {self.folder.path}{arrays}"
        self.display.say(database, f"Mode: {self.mode}; trainer: pid {os.getpid()}", begins)

    async def _publish(self, *, finished: bool) -> None:
        """Publish the saved weights, and the trainer's next step."""
        step = self.saved.step
        await publish(self.buffer, TrainState(step + 1, step, str(self.folder.weights), finished))

    async def _produce(self, sampler: Sampler) -> None:
        """Generate, by this process and its weights, until a batch for the next step is in the buffer."""
        step = self.saved.step
        self.engine.load(self.saved.policy, step)
        await self.strategy.produce_batch(
            self.engine, sampler, BATCH_GROUPS, train_step=step + 1, model_step=step, progress=False
        )

    async def _wait(self, workers: Workers) -> None:
        """Expire the groups that are too old for the next step, and wait until the workers' batch is in the buffer.

        Raises NotReadyError if the workers don't deliver a batch, ReplayBufError if one failed.
        """
        await worker_strategy(0).refresh(self.buffer, TASK, self.saved.step + 1)
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

    async def _train(self) -> None:
        """Take a batch and train; then save the buffer, then the weights."""
        saved, step = self.saved, self.saved.step + 1
        batch, _ = await self.buffer.take_batch({TASK: BATCH_GROUPS}, timeout=_BATCH_SECONDS, current_train_step=step)
        groups = sorted(batch[TASK], key=_number)  # makes floating-point sums independent of the order of arrival
        saved.rewards.append(await asyncio.to_thread(saved.policy.train, groups))
        saved.trained += map(_number, groups)
        saved.step = step
        await self.buffer.checkpoint(step)
        await asyncio.to_thread(self.folder.save, saved)
        self.figures.trained += len(groups)
        self.figures.staleness = [max(rollout.seq_staleness for rollout in group) for group in groups]
        self.figures.now = await self.buffer.tallies()
        await self._publish(finished=False)


def _number(group: list[RolloutState]) -> int:
    return int(group[0].group_id or 0)
