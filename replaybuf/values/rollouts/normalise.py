"""Preparing a group for storage: model steps, staleness, expiry."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from replaybuf.common.checks import MAX_STEP, shown
from replaybuf.errors import ReplayBufError, RolloutError
from replaybuf.values.rollouts.group_fields import (
    GroupFields,
    fields_of,
    is_text,
    length_of,
    step_ranges,
)
from replaybuf.values.rollouts.rollout import UNFIT, Status, group_status
from replaybuf.values.rollouts.rollout_type import BY_TOKEN, RolloutType
from replaybuf.values.rollouts.segments import flat
from replaybuf.values.rollouts.staleness import (
    EXPIRING_STATUSES,
    ExpiryRule,
    date_responses,
    expired_before,
    find_expired,
    mask_stale_tokens,
    reset_response,
    staleness_of,
    undated,
    unmatched,
)

# Longer lists of tokens are processed in another thread, to keep the event loop free.
_MANY_TOKENS = 10_000
#: Of these threads one computes at a time: each can hold the GIL against the loop for some milliseconds.
_computing_locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class Normalised:
    """The result of the put rules for a group.

    `train_step` is the step for which the staleness was computed; None if the rollouts brought their own, or if some of
    them expired. `dropped` is true for a group that has expired, now or before, and isn't retryable. `doubts` say
    what of the group is probably a mistake of the caller, by kind.
    """

    status: Status
    staleness: int
    train_step: int | None
    dropped: bool = False
    doubts: dict[str, str] = field(default_factory=dict)
    fields: GroupFields | None = None


async def normalise(
    rollouts: Sequence[Any],
    rollout_type: RolloutType,
    model_step: int | None,
    train_step: int | None,
    rule: ExpiryRule,
    override: Status | None = None,
) -> Normalised:
    """Apply the put rules to the rollouts, in place. Raises RolloutError if they lack required fields.

    `override` overrides the status derived from the rollouts.
    """
    rollout_type.require_all(
        rollouts,
        _features(
            rollout_type.cls is dict,
            model_step is not None,
            train_step is not None,
            rule.active,
            rule.token_stale_threshold is not None,
        ),
    )
    group = fields_of(rollouts, rollout_type)
    work = rollouts, group, rollout_type, model_step, train_step, rule, override
    if sum([len(row.response_ids) for row in group if isinstance(row.response_ids, (list, tuple))]) < _MANY_TOKENS:
        return _normalise(*work)
    loop = asyncio.get_running_loop()
    async with _computing_locks.get(loop) or _computing_locks.setdefault(loop, asyncio.Lock()):
        return await asyncio.to_thread(_normalise, *work)


async def normalise_fit(
    entries: Sequence[Any],
    rollout_type: RolloutType,
    least: int,
    model_step: int | None,
    train_step: int | None,
    rule: ExpiryRule,
) -> tuple[Normalised, list[Any], list[Any]]:
    """Apply the put rules to a group that is complete with `least` completed rollouts, if the others are unfit.

    `entries` are its rollouts, or lists of their segments. Return the result, the entries that it is of, and the
    others: none, unless the group is completed without them.
    """
    for rollout in (rollouts := flat(entries)):
        rollout_type.check_class(rollout)
    known = all(rollout_type.has(rollout, "status") for rollout in rollouts)
    statuses = [group_status(map(rollout_type.status, flat([item]))) if known else Status.COMPLETED for item in entries]
    fit = [item for item, status in zip(entries, statuses, strict=True) if status == Status.COMPLETED]
    unfit = [item for item, status in zip(entries, statuses, strict=True) if status in UNFIT]
    if unfit and len(fit) >= least and len(fit) + len(unfit) == len(entries):
        normal = await normalise(flat(fit), rollout_type, model_step, train_step, rule)
        if normal.status == Status.COMPLETED:
            return normal, fit, unfit
    return await normalise(rollouts, rollout_type, model_step, train_step, rule), list(entries), []


@lru_cache
def _features(
    is_dict: bool, dates: bool, has_train_step: bool, expires: bool, expires_tokens: bool
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the features used by a put, each with its required fields."""
    # In a dict, a missing mask and the steps from `model_step` are added.
    added = {"response_mask", "response_model_steps"} if dates else {"response_mask"}
    needed = {
        "model_step": ["response_model_steps"] if dates else [],  # and response_ids, or a response
        "current_train_step": ["response_model_steps"] if has_train_step else [],
        "stale_threshold": ["seq_staleness"] if expires and not has_train_step else [],
        "token_stale_threshold": ["response_ids", "response_model_steps", "response_mask"] if expires_tokens else [],
    }
    required = {
        feature: tuple(name for name in names if not (is_dict and name in added)) for feature, names in needed.items()
    }
    return tuple((feature, names) for feature, names in required.items() if names)


def _normalise(
    rollouts: Sequence[Any],
    group: GroupFields,
    kind: RolloutType,
    model_step: int | None,
    train_step: int | None,
    rule: ExpiryRule,
    override: Status | None,
) -> Normalised:
    try:
        status = _status_of(rollouts, group, kind) if override is None else override
        if model_step is not None:
            date_responses(rollouts, group, model_step, kind)
        expiring = status in EXPIRING_STATUSES
        doubts = _check_tokens(group) if expiring else {}
        normal = _apply_rules(rollouts, group, kind, status, train_step, rule)
        if expiring and rule.stale_threshold is not None:
            doubts |= _check_dated(normal.fields or fields_of(rollouts, kind), train_step)
        normal.doubts = doubts
        return normal
    except ReplayBufError:
        raise
    except (TypeError, ValueError, OverflowError, LookupError) as error:
        raise RolloutError(f"the rollouts' response_ids, mask, steps or staleness can't be used: {error!r}") from error


def _check_tokens(group: GroupFields) -> dict[str, str]:
    """Return a doubt if fields of the same tokens differ in length."""
    doubts: dict[str, str] = {}
    for index, row in enumerate(group):
        tokens, logprobs, mask, steps = row.response_ids, row.logprobs, row.response_mask, row.response_model_steps
        try:
            if len(tokens) == len(logprobs) == len(mask) == len(steps):
                continue  # as nearly all are
        except (TypeError, OverflowError):  # some are missing, or have no length
            pass
        lengths = [*map(length_of, (tokens, logprobs, mask, steps))]
        other_tokens = row.input_ids is not None or row.labels is not None  # which may be of other tokens
        if lengths[0] and len({0, *lengths}) > 2 and not other_tokens:
            listed = ", ".join(f"{length} {name}" for length, name in zip(lengths, BY_TOKEN, strict=True) if length)
            doubts["lengths"] = f"has {listed} in rollouts[{index}], which should be of the same tokens: the response's"
    return doubts


def _check_dated(group: GroupFields, train_step: int | None) -> dict[str, str]:
    """Return a doubt if nothing says how stale the group is: it has no train step and no staleness of its own, or it
    has responses, and none of its rollouts has model steps."""
    if train_step is None:
        unknown = (
            "has a stale_threshold but no current_train_step, and the seq_staleness of its rollouts is 0, so that it "
            "doesn't expire; give put the current_train_step"
        )
        return {} if any(row.seq_staleness for row in group) else {"unstepped": unknown}
    if any(oldest is not None for oldest, _ in step_ranges(group)):
        return {}
    if not any(is_text(row.response) or length_of(row.response_ids) for row in group):
        return {}  # interrupted before its first token
    return {
        "undated": "has no response_model_steps, so its staleness is always 0 and stale_threshold never applies; "
        "give put the model_step of the weights that wrote it"
    }


def _apply_rules(
    rollouts: Sequence[Any],
    group: GroupFields,
    kind: RolloutType,
    status: Status,
    train_step: int | None,
    rule: ExpiryRule,
) -> Normalised:
    if train_step is None:
        ages = [int(row.seq_staleness or 0) for row in group]
    else:
        ages = [staleness_of(oldest, train_step) for oldest, _ in step_ranges(group)]
        for row, staleness in zip(group, kind.set_all(rollouts, "seq_staleness", ages)):
            row.seq_staleness = staleness
    staleness = max(ages)
    if abs(staleness) >= MAX_STEP:
        raise RolloutError(f"seq_staleness is {shown(staleness)}, which is no number of training steps")
    if status not in EXPIRING_STATUSES:
        return Normalised(status, staleness, train_step, fields=group)
    if rule.token_stale_threshold is not None and (index := unmatched(group)) is not None:
        raise RolloutError(
            f"rollouts[{index}] has more response_model_steps than places in its response_mask; both, and "
            "response_ids, must be of the same tokens: those of the response"
        )
    expired = find_expired(group, rule, train_step, ages)
    if train_step is not None and status != Status.COMPLETED:
        expired = sorted({*expired, *expired_before(rollouts, kind)})
    if (expired or status == Status.EXPIRED) and not rule.retryable:
        for rollout in rollouts:
            kind.set_status(rollout, Status.EXPIRED)
        return Normalised(Status.EXPIRED, staleness, train_step, dropped=True)
    for index in expired:
        reset_response(rollouts[index], kind)
    through = rule.masked_through(train_step)
    if through is not None:
        _mask_stale(rollouts, kind, through)
    if not expired:
        return Normalised(status, staleness, train_step, fields=group if through is None else None)
    return Normalised(Status.EXPIRED, staleness, None)


def _mask_stale(rollouts: Sequence[Any], kind: RolloutType, through: int) -> None:
    """Mask out the tokens that are too old. Raises RolloutError for a response whose age is unknown."""
    if (index := undated(fields_of(rollouts, kind))) is not None:
        raise RolloutError(
            f"rollouts[{index}] has a response without response_model_steps, so token_stale_threshold can't tell how "
            "old its tokens are; give put the model_step of the weights that wrote them, or no token_stale_threshold"
        )
    mask_stale_tokens(rollouts, through, kind)


def _status_of(rollouts: Sequence[Any], group: GroupFields, kind: RolloutType) -> Status:
    """Return the status of a group. Finished rollouts whose status was never set become COMPLETED."""
    statuses = []
    for index, row in enumerate(group):
        try:
            statuses.append(row.status if type(row.status) is Status else kind.status(rollouts[index]))
        except RolloutError as error:
            raise RolloutError(f"rollouts[{index}].{error}") from None
    status = group_status(statuses)
    if status != Status.INIT or not is_finished(group) or any(map(kind.says_status, rollouts)):
        return status
    for rollout, row in zip(rollouts, group, strict=True):
        kind.set_status(rollout, Status.COMPLETED)
        row.status = kind.get(rollout, "status")
    return Status.COMPLETED


def is_finished(group: GroupFields | None) -> bool:
    """Return whether all rollouts have a response and a reward."""
    return group is not None and all(
        row.reward is not None and not (row.response is None and row.response_ids is None) for row in group
    )
