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
from collections import Counter
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
    DEFAULT_SECONDS,
    DEFAULT_STEPS,
    TASK,
    Run,
    RunFolder,
    buffer_config,
    colocated_strategy,
    made_place,
    sampler_of,
    worker_strategy,
)
from replaybuf.demo.worker import Engine, WorkerSettings
from replaybuf.errors import CheckpointError, NotReadyError, ReplayBufError, UnreachableError
from replaybuf.places.owners import IN_DATABASE
from replaybuf.produce import ProduceSummary, TrainState, publish, published
from replaybuf.produce.sampler import overwrite
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.urls import hosts_as_options, is_memory, parse_url, url_or_path, written
from replaybuf.storage.sql.inspection.reader import open_reader

_COMMAND = (sys.executable, "-m", "replaybuf.demo.worker")
_PATIENCE_SECONDS = 3.0  # time for a worker to end by itself
_LOOK_SECONDS = 0.2  # poll interval for dead workers while waiting for a batch
_STARVED_SECONDS = 60.0


class Colocated:
    """Production by the trainer's own process and weights, in turns with training: the modes sync and async."""

    pids: Sequence[int] = ()

    def __init__(self, mode: Mode, buffer: ReplayBuffer, run: Run, prompts: int, *, with_experts: bool) -> None:
        self._run = run
        self._engine = Engine(run.seed, with_experts=with_experts)
        self._sampler = sampler_of(buffer, run.seed, prompts)
        self._strategy = colocated_strategy(mode)

    async def produce(self) -> ProduceSummary:
        """Generate until a batch for the next step is in the buffer. Return a summary."""
        step = self._run.step
        self._engine.load(self._run.policy, step)
        return await self._strategy.produce_batch(
            self._engine, self._sampler, BATCH_GROUPS, train_step=step + 1, model_step=step, progress=False
        )

    async def tell(self, *, finished: bool) -> None:
        """Do nothing: there are no workers that need the train state."""

    def stop(self) -> None:
        """Do nothing: between two batches nothing is being generated."""


class Disaggregated:
    """Production by rollout workers while the trainer trains: the mode disaggregated. The constructor starts them.

    Killed workers are restarted; `say` is called with a line about each.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        run: Run,
        folder: RunFolder,
        workers: Sequence[WorkerSettings],
        say: Callable[[str], None],
    ) -> None:
        self._buffer, self._run, self._folder, self._say = buffer, run, folder, say
        self._strategy = worker_strategy(0)
        self._processes = {settings: self._start(settings) for settings in workers}

    @property
    def pids(self) -> Sequence[int]:
        """The process ids, by worker."""
        return [process.pid for process in self._processes.values()]

    async def produce(self) -> ProduceSummary:
        """Expire the groups that are too old for the next step, and wait until a batch is in the buffer.

        Raises NotReadyError if the workers don't deliver a batch, ReplayBufError if one failed.
        """
        summary = ProduceSummary()
        with summary.producing():
            summary.expired = await self._strategy.refresh(self._buffer, TASK, self._run.step + 1)
            deadline = time.monotonic() + _STARVED_SECONDS
            while True:
                self.restart_killed()
                try:
                    await self._buffer.wait_ready({TASK: BATCH_GROUPS}, timeout=_LOOK_SECONDS)
                    return summary
                except NotReadyError as error:
                    if time.monotonic() > deadline:
                        raise NotReadyError(
                            f"the workers gave no batch of {BATCH_GROUPS} groups within {_STARVED_SECONDS:g} s "
                            f"({error}); what they wrote is in {self._folder.log(0)}"
                        ) from error

    async def tell(self, *, finished: bool) -> None:
        """Publish the saved weights, and the trainer's next step."""
        step = self._run.step
        await publish(self._buffer, TrainState(step + 1, step, str(self._folder.weights), finished))

    def stop(self) -> None:
        """End the workers by closing their stdin, or kill them if that takes too long."""
        for process in self._processes.values():
            with suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, settings: WorkerSettings) -> subprocess.Popen[bytes]:
        """Start a worker; its output goes to its log. Ctrl-C in the terminal doesn't reach it."""
        with open(self._folder.log(settings.worker), "wb") as log:
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
                log = self._folder.log(settings.worker)
                written = log.read_text("utf-8", "replace").split("\n")
                said = next((line.strip() for line in reversed(written) if line.strip()), "it wrote nothing")
                raise ReplayBufError(f"{name} failed: {said} (all that it wrote is in {log})")
            with suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
            again = self._processes[settings] = self._start(settings)
            signal_name = signal.Signals(-code).name
            self._say(f"{name} (pid {process.pid}) was killed ({signal_name}); started again as pid {again.pid}")


_TAKE_SECONDS = 60.0
_THERE = (Tally.SIZE, Tally.LEASED)


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
        await asyncio.to_thread(check_owner, url)
        async with buffer_config(url, "trainer", payloads).build() as buffer:
            await overwrite(buffer.cursors, OWNER, 1, b"")
            if fresh:
                folder.clear()
                await clear(buffer)
            begun = await begin(buffer, folder, seed, steps or DEFAULT_STEPS)
            training = Training(url, mode, workers, folder, buffer, display, begun, payloads)
            await training.run(DEFAULT_SECONDS if steps is None else None)

    try:
        with folder.locked():
            asyncio.run(run())
    except KeyboardInterrupt:
        display.say("Stopped. Run the same command again to go on from here.")
        return False
    return True


#: The cursor that marks a database as the demo's own.
OWNER = "replaybuf demo"


def check_owner(url: str) -> None:
    """Raise ReplayBufError unless the database is empty, or the demo's own."""
    with suppress(UnreachableError):  # a file that isn't there; a server that is away says so when the buffer is opened
        reader = open_reader(url)
        if reader.read_any(lambda tx: tx.revision()) is None:
            return
        if reader.read(lambda tx: tx.value("SELECT count(*) FROM rb_cursor WHERE name = :name", name=OWNER)):
            return
        if names := reader.read(lambda tx: tx.values("SELECT DISTINCT buffer FROM rb_lane ORDER BY buffer")):
            raise ReplayBufError(
                f"{reader.where} has buffers of others ({', '.join(names):.200}), and the demo uses only an empty "
                "database or its own: give another --url"
            )


def default_folder(url: str) -> Path:
    """Return the run folder of a database: beside a SQLite file, in the current folder for PostgreSQL."""
    parsed = parse_url(url)
    if is_memory(parsed):
        raise ConfigError("the demo's processes can't share a database in memory: give a file, as in sqlite:///demo.db")
    if parsed.get_backend_name() == "sqlite":
        return Path(str(parsed.database)).with_suffix(".run")
    return Path(f"replaybuf-demo-{Path(str(parsed.database)).name}.run")


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
    groups, run = await _groups_there(buffer), folder.load()
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
        await buffer.restore(0)  # fences off a trainer that started at the same moment, in another folder
        return run
    if seed not in (None, run.seed):
        raise ReplayBufError(
            f"the run in {folder.path} was started with seed {run.seed}: go on with --seed {run.seed}, start anew "
            "with --fresh (removes its groups and weights), or give another --url"
        )
    try:
        await buffer.restore(run.step)
    except CheckpointError as error:
        raise ReplayBufError(
            f"the weights in {folder.path} are of another buffer than this one ({error}): give its --url, or start "
            "anew with --fresh (removes the weights and the demo's groups)"
        ) from error
    if run.aim(steps):
        folder.save(run)
    return run


async def clear(buffer: ReplayBuffer) -> None:
    """Remove an earlier run from the buffer: groups, also leased ones, checkpoints and both cursors.

    The cursors are the position in the prompts and the published train state.
    """
    await _groups_there(buffer)
    await buffer.checkpoint(0)
    await buffer.restore(0)  # ends leases, and fences off leftover workers
    await buffer.delete({"task_name": TASK})
    await asyncio.to_thread(sampler_of(buffer, 0, 0).load_state_dict, {"position": 0, "value": b""})
    if await published(buffer) is not None:
        await publish(buffer, None)
    for made in await buffer.checkpoints():
        await buffer.drop_checkpoint(made.step)


async def _groups_there(buffer: ReplayBuffer) -> int:
    """Return the number of the demo's groups. Raises ReplayBufError if other tasks have groups: restores affect all."""
    counts: Counter[str] = Counter()
    for (task, _, tally), count in (await buffer.tallies()).items():
        counts[task] += count if tally in _THERE else 0
    groups = counts.pop(TASK, 0)
    if others := sorted(+counts):
        raise ReplayBufError(
            f"the buffer has groups of other tasks ({', '.join(others):.200}), which the demo would take back with its "
            "own whenever it goes on: give it a database of its own with --url"
        )
    return groups


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
        self.figures, self.first_step = Figures(), self.saved.step

    async def run(self, seconds: float | None) -> None:
        """Train all steps, or as many as fit into `seconds`, and print the result."""
        saved, figures, started = self.saved, self.figures, time.monotonic()
        figures.count_store(await self.buffer.tallies())
        self.greet()
        production = await self._production()
        try:
            await production.tell(finished=False)
            with self.display.showing(saved, figures, self.mode, lambda: production.pids):
                while saved.step < saved.target and (seconds is None or time.monotonic() - started < seconds):
                    await self._step(production)
                await production.tell(finished=True)
                await asyncio.to_thread(production.stop)
                figures.count_store(await self.buffer.tallies())
        finally:
            production.stop()
        if any(figures.buffered.values()):
            await self.buffer.checkpoint(saved.step)  # includes groups generated since, for a continued run
        self._tell_the_end(time.monotonic() - started)
        if saved.step >= saved.target:
            self.folder.finish(saved)

    def greet(self) -> None:
        """Print the mode, the database and the steps of the run."""
        saved, (url, _) = self.saved, argument_of(self.url)
        arrays = f"; arrays: {self.payloads}" if self._apart else ""
        self.display.say(f"Buffer: {url}; weights: {self.folder.path}{arrays}")
        self.display.say(f"Mode: {self.mode}; trainer: pid {os.getpid()}")
        if saved.step == 0:
            self.display.say(f"Training a new policy for {saved.target} steps (seed {saved.seed})")
            return
        groups = sum(self.figures.buffered.values())
        self.display.say(f"Resuming at step {saved.step} of {saved.target} with {groups} groups in the buffer")

    def _tell_the_end(self, seconds: float) -> None:
        url, secret = argument_of(self.url)
        where = f"The weights are in {self.folder.path}. To look into the run{' (with PGPASSWORD)' if secret else ''}:"
        told = result(self.saved, self.figures, self.mode, self.first_step, seconds)
        for line in (*told, "", where, *commands(url, apart=self._apart)):
            self.display.say(line)

    @property
    def _apart(self) -> bool:
        """Whether rollouts have arrays that are kept outside the database."""
        return self.payloads != IN_DATABASE

    async def _production(self) -> Colocated | Disaggregated:
        saved = self.saved
        drawn = (await self.buffer.cursors.read(TASK)).position
        prompts = max(saved.target * BATCH_GROUPS, drawn)  # more were drawn if an earlier target was higher
        if self.mode != Mode.DISAGGREGATED:
            return Colocated(self.mode, self.buffer, saved, prompts, with_experts=self._apart)
        first = WorkerSettings(self.url, str(self.folder.path), 0, saved.seed, prompts, self.payloads)
        workers = [replace(first, worker=number) for number in range(self.workers)]
        return Disaggregated(self.buffer, saved, self.folder, workers, self.display.say)

    async def _step(self, production: Colocated | Disaggregated) -> None:
        produced = await production.produce()
        step = self.saved.step + 1
        batch, _ = await self.buffer.take_batch({TASK: BATCH_GROUPS}, timeout=_TAKE_SECONDS, current_train_step=step)
        with produced.training():
            groups = sorted(batch[TASK], key=_number)  # makes floating-point sums independent of the order of arrival
            await self._train(groups)
        self.figures.count_batch(groups, produced)
        self.figures.count_store(await self.buffer.tallies())
        await production.tell(finished=False)
        self.display.update(self.saved, self.figures, self.mode, self.first_step)

    async def _train(self, groups: list[list[RolloutState]]) -> None:
        """Train, then save the buffer, then the weights."""
        saved = self.saved
        saved.rewards.append(await asyncio.to_thread(saved.policy.train, groups))
        saved.trained += map(_number, groups)
        saved.step += 1
        await self.buffer.checkpoint(saved.step)
        await asyncio.to_thread(self.folder.save, saved)


def _number(group: list[RolloutState]) -> int:
    return int(group[0].group_id or 0)
