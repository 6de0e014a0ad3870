"""Runs of other databases and of exports, whose train steps are plotted beside those of the database that is served."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from replaybuf import units
from replaybuf.errors import InputError
from replaybuf.files.row_format import FileGroup
from replaybuf.files.sources import RolloutFile, is_sqlite
from replaybuf.redact import redact_path
from replaybuf.rollouts.rewards import reward_value
from replaybuf.storage.sql.inspection.groups import buffers_of
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.inspection.traces import StepSummary, summarise_steps

#: Train steps of a run that are plotted.
MOST_STEPS = 1000
_REWARD_KEY = "score"


#: Returns the last train steps of a run before one, newest first, within so many seconds.
OtherRun = Callable[[int | None, float], Sequence[StepSummary]]


def _of_buffer(reader: Reader, buffer: str, before: int | None, seconds: float) -> Sequence[StepSummary]:
    return reader.read(lambda tx: summarise_steps(tx, buffer, before=before, limit=MOST_STEPS), timeout=seconds)


def _of_export(steps: Sequence[StepSummary], before: int | None, seconds: float) -> Sequence[StepSummary]:
    return [one for one in steps if before is None or one.step < before][:MOST_STEPS]


def other_runs(sources: Sequence[str]) -> dict[str, OtherRun]:
    """Return the runs of databases (URLs or paths) and exports, by short names. Raises InputError, FileError, ..."""
    found: dict[str, OtherRun] = {}
    for source in sources:
        name, path = Path(source.partition("?")[0]).name or source, Path(source)
        if "://" not in source and (path.is_dir() or (path.exists() and not is_sqlite(path))):
            runs: dict[str, OtherRun] = {name: partial(_of_export, _summaries(source))}  # it is read once
        else:
            reader = open_reader(source)
            buffers = reader.read(buffers_of) or ["default"]
            labels = [name if len(buffers) == 1 else f"{name} {buffer}" for buffer in buffers]
            runs = {label: partial(_of_buffer, reader, one) for label, one in zip(labels, buffers, strict=True)}
        for label, run in runs.items():
            number, unique = 1, label
            while unique in found:
                number += 1
                unique = f"{label} ({number})"
            found[unique] = run
    return found


def _summaries(path: str) -> list[StepSummary]:
    """Return the train steps of an export, newest first. Raises InputError when no group says its step."""
    by_step: dict[int, list[FileGroup]] = defaultdict(list)
    for group in RolloutFile(path).read():
        if group.trained_step is not None:
            group.rollouts = [{"reward": one.get("reward")} for one in group.rollouts]
            by_step[group.trained_step].append(group)
    if not by_step:
        raise InputError(
            f"{redact_path(path)} has no groups that were trained on: archive= in the config keeps them, and export "
            "writes them with their train step"
        )
    return [_summary(step, by_step[step]) for step in sorted(by_step, reverse=True)]


def _summary(step: int, groups: Sequence[FileGroup]) -> StepSummary:
    known = ([reward_value(rollout["reward"], _REWARD_KEY) for rollout in one.rollouts] for one in groups)
    numbers = ([reward for reward in of_group if reward is not None] for of_group in known)
    rewards = [sum(of_group) / len(of_group) for of_group in numbers if of_group]
    staleness = [one.staleness for one in groups]
    times = [units.time_of(one.created_at or 0.0) for one in groups]
    return StepSummary(
        step=step,
        restores=0,
        resumed=False,
        undone=False,
        first_at=min(times),
        last_at=max(times),
        batches=1,
        groups=len(groups),
        settled=len(groups),
        reward=sum(rewards) / len(rewards) if rewards else None,
        min_reward=min(rewards, default=None),
        max_reward=max(rewards, default=None),
        staleness=sum(staleness) / len(staleness),
        max_staleness=max(staleness),
        oldest_model_step=None,
        newest_model_step=None,
        taken_by=[],
    )
