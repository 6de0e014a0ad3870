"""What is seen of a pair: draws, rows of views, values."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from itertools import cycle
from typing import Any

import numpy as np
from hypothesis import strategies as st

from replaybuf import ReplayBuffer, RolloutState, Status
from replaybuf.errors import ConfigError, ReplayBufError
from replaybuf.rules.limits import Limits, Rules
from replaybuf.rules.policies import (
    FIFOPolicy,
    LIFOPolicy,
    OrderTerm,
    PrioritizedPolicy,
    ReplayPolicy,
    StalenessPolicy,
    UniformPolicy,
)
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.outline import preview, reward_parts
from replaybuf.values.rollouts.rewards import reward_value
from tests.contract.harness import plain
from tests.query.conftest import queries as all_queries


async def outcome(operation: Callable[[ReplayBuffer], Awaitable[Any]], buffer: ReplayBuffer) -> Any:
    result = await caught(operation, buffer)
    return plain_error(result) if isinstance(result, BaseException) else plain(result)


def plain_error(result: Any) -> Any:
    if not isinstance(result, BaseException):
        return result
    # Only a database knows the workers of other processes, by whom another one of several tasks may come first.
    since, separator, _ = str(result).partition(": ")
    return type(result).__name__, since if separator and since.startswith("after ") else str(result)


async def caught(operation: Callable[[ReplayBuffer], Awaitable[Any]], buffer: ReplayBuffer) -> Any:
    try:
        return await operation(buffer)
    except ReplayBufError as error:
        return error


def seen(batch: Mapping[str, list[StorageItem]]) -> Any:
    """All that can be seen of groups that were drawn."""
    return {task: [fields(item) for item in items] for task, items in batch.items()}


def fields(item: StorageItem) -> Any:
    # By default the train step of a draw is that of the last refresh, which state dicts don't tell of.
    return plain({name: getattr(item, name) for name in type(item).__slots__ if name != "trained_step"})


async def all_items(buffer: ReplayBuffer) -> list[Any]:
    return [item async for item in buffer.find({})]


async def everything(buffer: ReplayBuffer) -> dict[str, Any]:
    items = await all_items(buffer)
    return {
        "items": [fields(item) for item in items],
        "len": len(buffer),
        "counts": await buffer.count_statuses(TASKS, Status),
        "dropped": [await buffer.dropped(task) for task in TASKS],
        "ready": await buffer.is_ready({"a": 2, "b": 1}),
        "tallies": {key: n for key, n in (await buffer.storage.tallies()).items() if n},
        **await buffer.storage.histograms(("staleness", "times_sampled")),
    }


Rows = list[dict[str, Any]]
_VIEWS = {"groups": "uid", "rollouts": "uid, position"}
# Written otherwise than what `find` gives, or of no use to compare.
_OTHERWISE = {"created_at", "archived_at", "bytes", "put_step", "full_prompt", "full_response", "messages"}


def read_views(tx: Transaction) -> dict[str, Rows]:
    """The rows of the SQL views, as far as they can be compared."""
    views = {view: tx.rows(f"SELECT * FROM {view} ORDER BY {order}") for view, order in _VIEWS.items()}
    return {
        view: [{name: value for name, value in row.items() if name not in _OTHERWISE} for row in rows]
        for view, rows in views.items()
    }


def expected_views(items: list[StorageItem]) -> dict[str, Rows]:
    """The rows of `groups` and `rollouts`, ordered by uid and position."""
    return {
        "groups": [_group_row(item) for item in items],
        "rollouts": [_rollout_row(item, position) for item in items for position in range(len(item.item))],
    }


def _group_row(item: StorageItem) -> dict[str, Any]:
    reasons = Counter(rollout.finish_reason for rollout in item.item if rollout.finish_reason is not None)
    return {
        "uid": item.uid,
        "timestamp_id": item.timestamp_id,
        "buffer": "default",
        "task_name": item.task_name,
        "status": item.status.value,
        "staleness": item.staleness,
        "priority": item.priority,
        "times_sampled": item.times_sampled,
        "deliveries": item.deliveries,
        "reward": item.reward,
        "rollouts": len(item.item),
        "prompt_tokens": sum(_length(rollout.prompt_ids) for rollout in item.item),
        "response_tokens": sum(_length(rollout.response_ids) for rollout in item.item),
        "finish_reasons": " ".join(f"{reason}:{times}" for reason, times in sorted(reasons.items())) or None,
        "prompt": "?",
        "response": preview(item.item[0].response),
        "tags": item.tags,
        "key": item.key,
        "group_size": None,
        "group_index": None,
        "error": item.error,
        "worker": item.worker,
        "leased_by": None,
    }


def _rollout_row(item: StorageItem, position: int) -> dict[str, Any]:
    rollout = item.item[position]
    steps = rollout.response_model_steps
    return {
        "uid": item.uid,
        "position": position,
        "buffer": "default",
        "task_name": item.task_name,
        "rollout_id": _text(rollout.rollout_id),
        "status": rollout.status.value,
        "staleness": rollout.seq_staleness,
        "oldest_model_step": int(min(steps)) if _length(steps) else None,
        "reward": reward_value(rollout.reward),
        "rewards": reward_parts(rollout.reward) or None,
        "prompt_tokens": _length(rollout.prompt_ids),
        "response_tokens": _length(rollout.response_ids),
        "finish_reason": rollout.finish_reason,
        "prompt": "?",
        "response": preview(rollout.response),
        "error_msg": preview(rollout.error_msg),
        "worker": item.worker,
        "rollout": position,
        "parent": None,
    }


def _length(values: Any) -> int:
    return 0 if values is None else len(values)


def _text(value: Any) -> str | None:
    return None if value is None else preview(str(value))


TASKS = ("a", "b")


def _policy(name_: str, *terms: str) -> type[ReplayPolicy]:
    class Policy(ReplayPolicy):
        name = name_
        order = tuple(OrderTerm(term.removeprefix("-"), term.startswith("-")) for term in (*terms, "timestamp_id"))

    return Policy


POLICIES = (
    FIFOPolicy,
    StalenessPolicy,
    StalenessPolicy,
    LIFOPolicy,
    UniformPolicy,
    PrioritizedPolicy,
    _policy("best_first", "-reward"),
    _policy("freshest", "staleness", "-reward"),
    _policy("important", "-priority", "-staleness"),
)


def _rules(sampler: type[ReplayPolicy], remover: type[ReplayPolicy], limits: dict[str, Any]) -> Rules | None:
    try:
        return Rules(sampler(seed=7), remover(seed=7), Limits(**limits))
    except ConfigError:
        return None


# Nothing in them depends on time: the archive is large, and buffers don't wait for room.
limits = st.fixed_dictionaries(
    {"max_times_sampled": st.sampled_from([1, 0, 2, 3])},
    optional={
        "capacity": st.integers(2, 8),
        "on_full": st.sampled_from(["evict", "evict", "reject", "block"]),
        "min_size": st.sampled_from([0, 0, 1, 3]),
        "samples_per_insert": st.sampled_from([None, None, 0.5, 1, 2]),
        "archive_groups": st.sampled_from([None, 10_000]),
        "unfit_groups": st.sampled_from([None, 10_000]),
        "max_deliveries": st.sampled_from([0, 2, 3, 5]),
    },
)
samplers = st.sampled_from(POLICIES) | st.sampled_from([UniformPolicy, PrioritizedPolicy])
rules = st.builds(_rules, samplers, st.sampled_from(POLICIES), limits).filter(bool)
small = st.integers(-1, 9)
tasks = st.sampled_from(TASKS)
statuses = st.sampled_from([Status.COMPLETED] * 6 + [Status.EXPIRED] * 4 + [*Status])
thresholds = st.none() | st.integers(1, 6)
tokens = st.none() | st.lists(st.integers(0, 3), max_size=3)
rarely = st.sampled_from([None] * 5 + [[], [1]])
rollouts = st.fixed_dictionaries(
    {
        "response_model_steps": st.none() | st.lists(small, max_size=3) | st.lists(small, min_size=1, max_size=3),
        "response_ids": tokens,
        "response_mask": st.none() | st.lists(st.integers(0, 1), max_size=4),
        "seq_staleness": st.integers(-2, 6),
        "reward": st.sampled_from([None, 0.5, 1, {"score": 0.25}, {"score": None}, float("nan"), -1.0]),
        "arrays": st.booleans(),
    },
    optional={
        "input_ids": rarely,
        "labels": rarely,
        "prompt_ids": tokens,
        "finish_reason": st.sampled_from([None, "stop", "length"]),
        "response": st.none() | st.text(max_size=3),
        "rollout_id": st.sampled_from([7, "seven", "\x00\udfff", 2**60]),
        "mm_info": st.just({"image": b"\x00"}),
    },
)
# The statuses of the rollouts of a group; groups of one status are those that are taken and refreshed.
of_one = st.sampled_from(["completed"] * 8 + ["aborted", "expired"]).map(lambda status: [status])
mixed = st.lists(st.sampled_from(Status), min_size=1, max_size=3)
groups = st.tuples(
    st.integers(0, 7).flatmap(lambda chance: of_one if chance else mixed),
    st.lists(rollouts, min_size=1, max_size=3),
)


puts = st.fixed_dictionaries(
    {"items": groups, "task_name": tasks},
    optional={
        "model_step": small,
        "current_train_step": small,
        "stale_threshold": thresholds,
        "token_stale_threshold": thresholds,
        "expired_groups_retryable": st.booleans(),
        "keep_unfit": st.booleans(),
        "priority": st.sampled_from([0, 0.5, 1, 2]),
        "tags": st.none()
        | st.dictionaries(st.sampled_from(["a", 'b"']), st.sampled_from([0, 1, 1.5, True, None, "a"])),
        "key": st.sampled_from(["k", "l", '"\\']),
        "replaces": st.sampled_from([[], [], [1], [2, 3], [5], [8]]),
    },
)
#: The model doesn't know by which train step a group was trained on (see `side_by_side.seen`).
queries = all_queries.filter(lambda query: "trained_step" not in repr(query))
sometimes = st.sampled_from([None, None, None, {}]) | queries
some_uids = st.sets(st.integers(0, 9), max_size=3).map(lambda uids: {"uid": {"$in": list(uids)}})
by_task = st.dictionaries(tasks, thresholds) | st.builds(dict.fromkeys, st.just(TASKS), thresholds)
sizes = st.sampled_from([-1, 0, 1, 1, 2, 2, 3, 4])
changes = st.fixed_dictionaries(
    {},
    optional={
        "status": statuses,
        "priority": st.sampled_from([0, 1, 3]),
        "tags": st.sampled_from([None, {"a": 1}]),
    },
)
orders = st.lists(
    st.sampled_from(
        [sign + name for sign in ("", "-") for name in ("staleness", "reward", "priority", "status", "uid")]
    ),
    max_size=2,
)


def make_group(statuses_and_fields: tuple[list[str], list[dict[str, Any]]]) -> list[RolloutState]:
    """New rollouts as drawn, statuses and fields; the same again at each call."""
    new_group = []
    for status, fields in zip(cycle(statuses_and_fields[0]), copy.deepcopy(statuses_and_fields[1]), strict=False):
        if fields.pop("arrays"):
            fields = {name: np.array(v, np.int32) if isinstance(v, list) else v for name, v in fields.items()}
        new_group.append(RolloutState(message=[{"role": "user", "content": "?"}], status=Status(status), **fields))
    return new_group


def make_prompt(number: int) -> list[RolloutState]:
    """A group of which nothing was generated yet."""
    return [RolloutState(rollout_id=number, message=[{"role": "user", "content": "?"}], status=Status.INIT)]
