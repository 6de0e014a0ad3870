"""A rollout worker: a process that generates groups with weights that lag behind, and puts them into the buffer.

Started by the trainer as `python -m replaybuf.demo.worker`, with its settings in the first line of its standard input
(so that no password is in the list of processes). The end of that input means that the run is over or the trainer gone,
also by kill -9: then the worker puts back its groups in flight, and ends.

Nothing is lost when a worker is killed: its prompts are handed out again some seconds later.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from replaybuf import FencedError, ReplayBufError
from replaybuf.demo.blas import use_one_thread
from replaybuf.demo.engine import Engine
from replaybuf.demo.settings import BATCH_GROUPS, WorkerSettings, buffer_config, sampler_of, worker_strategy
from replaybuf.demo.weights import load_policy
from replaybuf.produce import TrainState, produce_loop

_GRACE_SECONDS = 1.0
_REJOIN_SECONDS = 0.2


async def work(settings: WorkerSettings, stop: asyncio.Event, engine: Engine | None = None) -> None:
    """Generate until the trainer has finished, or `stop` is set; after a restore, join the buffer anew."""
    engine = engine or Engine(settings.seed, settings.session)

    async def load_weights(state: TrainState) -> int | None:
        loaded = await asyncio.to_thread(load_policy, Path(settings.folder))
        if loaded is None:
            raise ReplayBufError(f"there are no weights in {settings.folder}: was the folder removed?")
        engine.load(*loaded)
        return loaded[1]

    try:
        while not stop.is_set():
            try:
                async with buffer_config(settings.url).build() as buffer:
                    await produce_loop(
                        worker_strategy(settings.worker),
                        engine,
                        sampler_of(buffer, settings.seed, settings.prompts),
                        BATCH_GROUPS,
                        load_weights=load_weights,
                        max_lag=settings.max_lag,
                        stop=stop,
                        worker=f"worker-{settings.worker}",
                    )
                    return
            except FencedError as error:
                print(f"joining anew: {error}", file=sys.stderr, flush=True)
                await asyncio.sleep(_REJOIN_SECONDS)  # if this worker's own trainer is gone, `stop` is set by then
    finally:
        engine.close()


async def _work_until_the_end_of_input(settings: WorkerSettings) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    threading.Thread(target=_end_with_input, args=(stop, loop), daemon=True).start()
    await work(settings, stop)


def _end_with_input(stop: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Wait for the end of the input; then give the groups in flight a moment, and end the process in any case."""
    while os.read(0, 4096):
        pass
    with suppress(RuntimeError):  # it has ended
        loop.call_soon_threadsafe(stop.set)
    threading.Event().wait(_GRACE_SECONDS)
    os._exit(0)


def _read_line() -> str:
    """Read and return the first line of the input, and no byte more."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(0)  # the trainer has gone
        line += byte
    return line.decode()


def main() -> int:
    """Run a worker. Return its exit code."""
    use_one_thread()
    settings = WorkerSettings.from_json(_read_line())
    try:
        asyncio.run(_work_until_the_end_of_input(settings))
    except ReplayBufError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
