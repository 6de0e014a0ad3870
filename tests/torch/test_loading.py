"""Batches through a DataLoader: with workers and without, whatever ends the loop, nothing is lost."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from typing import Any

import pytest
from torch.utils.data import DataLoader

from replaybuf import ReplayBufferConfig
from replaybuf.buffer.sync import run
from replaybuf.errors import ConfigError, InputError, NotReadyError, QueryError
from replaybuf.integrations.torch import GroupDataset, leased_steps
from replaybuf.rules.diagnosis import Reason
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.presence.conftest import list_events
from tests.torch.conftest import TASK, group, numbers, put, settled, totals

NONE: dict[str, Any] = {}
FORKED = {"num_workers": 2, "in_order": False, "multiprocessing_context": "fork"}
SPAWNED = {"num_workers": 2, "in_order": False, "multiprocessing_context": "spawn", "prefetch_factor": 3}
LOADERS = pytest.mark.parametrize("options", [NONE, FORKED, SPAWNED], ids=["none", "forked", "spawned"])
QUICK = pytest.mark.parametrize("options", [NONE, FORKED], ids=["none", "forked"])


def loader(dataset: GroupDataset, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, **options)


@LOADERS
def test_every_group_is_in_one_batch(shared_config: ReplayBufferConfig, options: dict[str, Any]) -> None:
    put(shared_config, 22)
    dataset = GroupDataset(shared_config, {TASK: 4}, collate=numbers, timeout=0)
    batches = []
    with leased_steps(loader(dataset, **options)) as steps:
        for step in steps:
            batches.append(step.batch)
            assert [item.uid for item in step.items[TASK]] == sorted(step.open)
            step.acknowledge()
            assert not step.open
    assert sorted(itertools.chain(*batches)) == list(range(22))
    assert sorted(map(len, batches)) == [2, 4, 4, 4, 4, 4]
    assert totals(shared_config) == {Tally.PUT: 22, Tally.SAMPLED_NEW: 22, Tally.TAKEN: 22}


@LOADERS
def test_a_batch_is_of_the_step_that_trains_on_it(shared_config: ReplayBufferConfig, options: dict[str, Any]) -> None:
    """However long before a worker has leased it."""
    put(shared_config, 12)
    dataset = GroupDataset(shared_config, {TASK: 3}, collate=numbers, timeout=0)
    with leased_steps(loader(dataset, **options), train_step=100) as steps:
        for number, step in enumerate(steps):
            assert step.train_step == 100 + number
            with step:
                pass
    assert settled(shared_config) == {100: 3, 101: 3, 102: 3, 103: 3}


@QUICK
def test_a_batch_is_of_the_step_that_the_trainer_names(config: ReplayBufferConfig, options: dict[str, Any]) -> None:
    """To acknowledge, or of the step that was refreshed last by then; else the step's own, which may be set."""
    put(config, 8)
    dataset = GroupDataset(config, {TASK: 2}, collate=numbers, timeout=0)
    with leased_steps(loader(dataset, **options)) as steps:
        next(steps).acknowledge(train_step=7)
        step = next(steps)
        step.train_step = 8
        step.acknowledge()
        for last in (9, 10):
            step = next(steps)
            with config.build_sync() as trainer:
                trainer.refresh_staleness(task_stale_thresholds={TASK: None}, current_train_step=last)
            step.acknowledge()
    assert settled(config) == {7: 2, 8: 2, 9: 2, 10: 2}


@QUICK
def test_a_break_gives_everything_back(shared_config: ReplayBufferConfig, options: dict[str, Any]) -> None:
    put(shared_config, 20)
    dataset = GroupDataset(shared_config, {TASK: 3}, collate=numbers, timeout=120)
    with leased_steps(loader(dataset, **options)) as steps:
        next(steps).acknowledge()
        for _ in steps:  # not acknowledged
            break
    totals_left = totals(shared_config)
    assert (totals_left[Tally.SIZE], totals_left[Tally.LEASED], totals_left[Tally.TAKEN]) == (17, 0, 3)
    assert totals_left[Tally.LEASE_EXPIRED] == 0  # given back, not run out


@QUICK
def test_an_error_in_the_step_counts_as_a_failed_delivery(config: ReplayBufferConfig, options: dict[str, Any]) -> None:
    put(config, 4)
    dataset = GroupDataset(config, {TASK: 2}, timeout=120)
    with leased_steps(loader(dataset, **options)) as steps:
        step = next(steps)
        uids = step.open
        with pytest.raises(ZeroDivisionError), step:
            1 / 0  # noqa: B018
    with leased_steps(loader(GroupDataset(config, {TASK: 4}, timeout=120))) as steps:
        [items] = next(steps).items.values()
        assert {item.uid: item.deliveries for item in items} == {
            item.uid: 2 if item.uid in uids else 1 for item in items
        }


@QUICK
def test_a_wait_ends_with_what_was_missing(config: ReplayBufferConfig, options: dict[str, Any]) -> None:
    put(config, 3)
    dataset = GroupDataset(config, {TASK: 4}, timeout=0.3)
    with (
        leased_steps(loader(dataset, **options)) as steps,
        pytest.raises(NotReadyError, match=r"^the trainer waited for 0.3 s: Too little .*; task math: 3") as raised,
    ):
        next(steps)
    assert raised.value.diagnosis.reason in Reason
    assert raised.value.diagnosis.task_name == TASK
    assert totals(config)[Tally.SIZE] == 3


@LOADERS
def test_a_wait_that_ends_is_noted_as_others_are(shared_config: ReplayBufferConfig, options: dict[str, Any]) -> None:
    """Though the trainer may die of it, and its workers with it."""
    put(shared_config, 3)
    config = shared_config.model_copy(update={"worker": "trainer-1"})
    dataset = GroupDataset(config, {TASK: 4}, collate=numbers, timeout=1.5)
    with leased_steps(loader(dataset, **options)) as steps, pytest.raises(NotReadyError):
        next(steps)
    events = open_reader(config.url).read(lambda tx: list_events(tx, "default", kind="gave_up"))
    assert {(event.worker, event.task_name, event.groups) for event in events} == {("trainer-1", TASK, 4)}
    assert all(
        re.match(r"after \S+ of waiting for groups: Too little .* \(3 of 4\)", str(event.detail)) for event in events
    )
    assert not any(" ago" in str(event.detail) for event in events)  # whoever reads it does so later


@QUICK
def test_the_last_groups_are_trained_on_with_at_least_one(config: ReplayBufferConfig, options: dict[str, Any]) -> None:
    put(config, 7)
    dataset = GroupDataset(config, {TASK: 4}, collate=numbers, at_least=1, timeout=1)
    received: list[int] = []

    def train() -> None:
        with leased_steps(loader(dataset, **options)) as steps:
            for step in steps:
                received.extend(step.batch)
                step.acknowledge()

    with pytest.raises(NotReadyError):
        train()
    assert sorted(received) == list(range(7))


def test_with_timeout_0_and_at_least_one_the_iteration_ends_when_nothing_is_there(config: ReplayBufferConfig) -> None:
    put(config, 7)
    dataset = GroupDataset(config, {TASK: 4}, collate=numbers, at_least=1, timeout=0)
    received: list[list[int]] = []
    with leased_steps(loader(dataset)) as steps:
        for step in steps:
            received.append([*step.batch])
            step.acknowledge()
    assert received == [[0, 1, 2, 3], [4, 5, 6]]


def test_waiting_while_the_trainer_trains_does_not_count(config: ReplayBufferConfig) -> None:
    put(config, 2)
    dataset = GroupDataset(config, {TASK: 2}, collate=numbers, timeout=2)
    options = {**FORKED, "num_workers": 1, "in_order": True}
    with leased_steps(loader(dataset, **options)) as steps:
        next(steps).acknowledge()
        time.sleep(2.5)  # a long step; the worker has been waiting since its beginning
        put(config, 2, since=2)
        assert next(steps).batch == [2, 3]


def refuses(items: list[Any]) -> None:
    raise RuntimeError(f"not these {len(items)}")


@LOADERS
def test_errors_of_workers_arrive(config: ReplayBufferConfig, options: dict[str, Any]) -> None:
    put(config, 8)
    dataset = GroupDataset(config, {TASK: 2}, collate=refuses, timeout=120)
    with pytest.raises(RuntimeError, match="not these 2"), leased_steps(loader(dataset, **options)) as steps:
        next(steps)
    assert totals(config)[Tally.SIZE] == 8


def test_a_killed_worker_is_an_error_and_its_groups_come_back(shared_config: ReplayBufferConfig) -> None:
    put(shared_config, 12)
    dataset = GroupDataset(shared_config, {TASK: 2}, collate=numbers_and_pid, timeout=60, seconds=2)
    received, acknowledged = [], []

    def train_and_kill() -> None:
        with leased_steps(loader(dataset, **FORKED)) as steps:
            for step in steps:
                received.extend(step.batch[0])
                step.acknowledge()  # torch's error may strike in here, by a signal: then its groups come again
                acknowledged.extend(step.batch[0])
                os.kill(step.batch[1], signal.SIGKILL)

    with pytest.raises(RuntimeError, match="worker"):
        train_and_kill()
    before = len(received)
    dataset = GroupDataset(shared_config, {TASK: 1}, collate=numbers, timeout=120)
    with leased_steps(loader(dataset)) as steps:
        while len(set(received)) < 12:
            step = next(steps)
            received += step.batch
            step.acknowledge()
    assert not set(received[before:]) & set(acknowledged)
    assert len(received[before:]) == len(set(received[before:]))
    assert totals(shared_config)[Tally.TAKEN] == 12


def numbers_and_pid(items: list[Any]) -> tuple[list[int], int]:
    return numbers(items), os.getpid()


def test_leases_go_on_while_a_step_lasts(shared_config: ReplayBufferConfig) -> None:
    """Those of the trainer, and those of batches that wait in the DataLoader."""
    put(shared_config, 8)
    dataset = GroupDataset(shared_config, {TASK: 2}, collate=numbers, timeout=0, seconds=3)
    received = []
    with leased_steps(loader(dataset, **FORKED)) as steps:
        for number, step in enumerate(steps):
            time.sleep(0 if number else 4)
            received += step.batch
            step.acknowledge()
    assert sorted(received) == list(range(8))
    assert totals(shared_config) == {Tally.PUT: 8, Tally.SAMPLED_NEW: 8, Tally.TAKEN: 8}


@pytest.mark.parametrize("policy", ["uniform", "prioritized"])
def test_weights_come_with_the_items(config: ReplayBufferConfig, policy: str) -> None:
    config = config.model_copy(update={"policy": policy, "seed": 1})
    put(config, 4)
    with leased_steps(loader(GroupDataset(config, {TASK: 2}, beta=1.0, timeout=120))) as steps:
        step = next(steps)
        assert [item.weight for item in step.items[TASK]] == [1.0, 1.0]
        assert [item.weight for item in step.batch] == [1.0, 1.0]


def test_a_buffer_of_this_process_is_drawn_from_without_workers() -> None:
    buffer = ReplayBufferConfig(url="memory://", policy="fifo").build()
    with pytest.raises(InputError, match="workers open a buffer of their own"):
        leased_steps(loader(GroupDataset(buffer, {TASK: 1}), num_workers=1)).__enter__()
    run(buffer.put(group(0), TASK))
    with leased_steps(loader(GroupDataset(buffer, {TASK: 1}, collate=numbers))) as steps:
        step = next(steps)
        assert step.batch == [0]
        step.acknowledge()
    assert len(buffer) == 0


def test_what_cannot_be_asked_for_is_refused_at_once(config: ReplayBufferConfig) -> None:
    for options, error in (
        ({"timeout": "soon"}, InputError),
        ({"seconds": -1}, InputError),
        ({"where": {"$nor": 1}}, QueryError),
        ({"group_status": "archived"}, InputError),
        ({"beta": "a"}, InputError),
    ):
        with pytest.raises(error):
            GroupDataset(config, {TASK: 1}, **options)
    with pytest.raises(InputError, match="source must be a ReplayBufferConfig or a ReplayBuffer, got str"):
        GroupDataset("sqlite:///x.db", {TASK: 1})  # type: ignore[arg-type]
    for url in ("memory://", "sqlite:///:memory:"):
        with pytest.raises(ConfigError, match="private buffer in memory"):
            GroupDataset(ReplayBufferConfig(url=url), {TASK: 1})


def test_a_loader_that_would_hold_groups_back_is_refused(config: ReplayBufferConfig) -> None:
    dataset = GroupDataset(config, {TASK: 1})
    for refused, message in (
        (DataLoader(dataset, batch_size=2), "batch_size=None"),
        (loader(dataset, num_workers=2), "in_order=False"),
        (DataLoader([1], batch_size=None), "the DataLoader of a GroupDataset, got one of list"),
    ):
        with pytest.raises(InputError, match=message), leased_steps(refused):
            pass
    with pytest.raises(InputError, match="iterate over leased_steps"):
        next(iter(loader(dataset)))
    with leased_steps(loader(dataset)), pytest.raises(InputError, match="is being iterated over"):
        leased_steps(loader(dataset)).__enter__()
