"""The start of a run: with new weights, or with those saved last and the buffer as it was then."""

from __future__ import annotations

import asyncio

from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.demo.folder import RunFolder
from replaybuf.demo.grpo import Trainer
from replaybuf.demo.settings import TASK, sampler_of
from replaybuf.demo.weights import Saved
from replaybuf.errors import CheckpointError, ReplayBufError
from replaybuf.produce import publish, published
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.tallies import Tally

_THERE = (Tally.SIZE, Tally.LEASED)


async def begin(buffer: ReplayBuffer, folder: RunFolder, seed: int | None) -> Saved:
    """Return a new run, or the folder's run. Raises ReplayBufError if folder, buffer or seed don't match."""
    await _check_alone(buffer)
    saved = folder.load()
    if saved is None:
        await _check_unused(buffer, folder)
        saved = Saved(Trainer.create(seed or 0), seed or 0)
        await buffer.checkpoint(0)  # before any weights, so that there is always one to go back to
        folder.save(saved)
        await buffer.restore(0)  # fences off a trainer that started anew at the same moment, in another folder
        return saved
    if seed not in (None, saved.seed):
        raise ReplayBufError(
            f"the run in {folder.path} was started with seed {saved.seed}: go on with --seed {saved.seed}, start anew "
            "with --fresh (removes its groups and weights), or give another --url"
        )
    try:
        await buffer.restore(saved.step)
    except CheckpointError as error:
        raise ReplayBufError(
            f"the weights in {folder.path} are of another buffer than this one ({error}): give its --url, or start "
            "anew with --fresh (removes the weights and the demo's groups)"
        ) from error
    return saved


async def clear(buffer: ReplayBuffer) -> None:
    """Remove an earlier run from the buffer: groups, also those in flight, cursors and checkpoints.

    Of the cursors, one is the place in the prompts, and the other what the trainer has published.
    """
    await _check_alone(buffer)
    await buffer.checkpoint(0)
    await buffer.restore(0)  # ends leases, and fences off leftover workers
    await buffer.delete({"task_name": TASK})
    await asyncio.to_thread(sampler_of(buffer, 0, 0).load_state_dict, {"position": 0, "value": b""})
    if await published(buffer) is not None:
        await publish(buffer, None)
    for made in await buffer.checkpoints():
        await buffer.drop_checkpoint(made.step)


async def _check_alone(buffer: ReplayBuffer) -> None:
    """Raise ReplayBufError if the buffer has other tasks: restores take all tasks back."""
    tallies = await buffer.tallies()
    others = sorted({task for (task, _, tally), count in tallies.items() if task != TASK and count and tally in _THERE})
    if others:
        raise ReplayBufError(
            f"the buffer has groups of other tasks ({', '.join(others):.200}), which the demo would take back with its "
            "own whenever it goes on: give it a database of its own with --url"
        )


async def _check_unused(buffer: ReplayBuffer, folder: RunFolder) -> None:
    tallies = await buffer.tallies()
    groups = sum(tallies.get((TASK, status, tally), 0) for status in Status for tally in _THERE)
    if groups or (await buffer.cursors.read(TASK)).position:
        raise ReplayBufError(
            f"the buffer has {groups} groups of a demo run whose weights are not in {folder.path}: give its --run-dir, "
            "or start anew with --fresh (removes these groups)"
        )
