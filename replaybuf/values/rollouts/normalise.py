"""Preparing a group for storage: model steps, staleness, expiry."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from replaybuf.common.checks import MAX_STEP
from replaybuf.errors import ReplayBufError, RolloutError
from replaybuf.values.rollouts.group_fields import GroupFields, is_text, refuse_none
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
_computing: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


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
    said: Status | None = None,
) -> Normalised:
    """Apply the put rules to the rollouts, in place. Raises RolloutError if they lack required fields.

    `said` overrides the status derived from the rollouts.
    """
    rollout_type.require_all(rollouts, _features(rollout_type, model_step, train_step, rule))
    group = GroupFields.of(rollouts, rollout_type)
    work = partial(_normalise, rollouts, group, rollout_type, model_step, train_step, rule, said)
    if sum(len(tokens) for tokens in group.response_ids if isinstance(tokens, (list, tuple))) < _MANY_TOKENS:
        return work()
    loop = asyncio.get_running_loop()
    async with _computing.get(loop) or _computing.setdefault(loop, asyncio.Lock()):
        return await asyncio.to_thread(work)


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
    said = all(rollout_type.has(rollout, "status") for rollout in flat(entries))
    statuses = [group_status(map(rollout_type.status, flat([one]))) if said else Status.COMPLETED for one in entries]
    fit = [one for one, status in zip(entries, statuses, strict=True) if status == Status.COMPLETED]
    unfit = [one for one, status in zip(entries, statuses, strict=True) if status in UNFIT]
    if unfit and len(fit) >= least and len(fit) + len(unfit) == len(entries):
        normal = await normalise(flat(fit), rollout_type, model_step, train_step, rule)
        if normal.status == Status.COMPLETED:
            return normal, fit, unfit
    return await normalise(flat(entries), rollout_type, model_step, train_step, rule), list(entries), []


def _features(
    kind: RolloutType, model_step: int | None, train_step: int | None, rule: ExpiryRule
) -> list[tuple[str, list[str]]]:
    """Return the features used by a put, each with its required fields."""
    features: list[tuple[str, list[str]]] = []
    if model_step is not None:
        features.append(("model_step", ["response_model_steps"]))  # and response_ids, or a response
    if train_step is not None:
        features.append(("current_train_step", ["response_model_steps"]))
    elif rule.active:
        features.append(("stale_threshold", ["seq_staleness"]))
    if rule.token_stale_threshold is not None:
        features.append(("token_stale_threshold", ["response_ids", "response_model_steps", "response_mask"]))
    if kind.cls is not dict:
        return features
    # In a dict, a missing mask and the steps from `model_step` are added.
    given = {"response_mask"} if model_step is None else {"response_mask", "response_model_steps"}
    return [(feature, [name for name in names if name not in given]) for feature, names in features]


def _normalise(
    rollouts: Sequence[Any],
    group: GroupFields,
    kind: RolloutType,
    model_step: int | None,
    train_step: int | None,
    rule: ExpiryRule,
    said: Status | None,
) -> Normalised:
    try:
        status = _status_of(rollouts, group, kind) if said is None else said
        if model_step is not None:
            date_responses(rollouts, group, model_step, kind)
        expiring = status in EXPIRING_STATUSES
        doubts = _check_tokens(group) if expiring else {}
        normal = _apply_rules(rollouts, group, kind, status, train_step, rule)
        if expiring and train_step is not None and rule.stale_threshold is not None:
            doubts |= _check_dated(normal.fields or GroupFields.of(rollouts, kind))
        normal.doubts = doubts
        return normal
    except ReplayBufError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        refuse_none("response_model_steps", group.response_model_steps)
        raise RolloutError(f"the rollouts' response_ids, steps or staleness can't be used: {error}") from error


_LISTS = frozenset({list, tuple})


def _check_tokens(group: GroupFields) -> dict[str, str]:
    """Return a doubt if fields of the same tokens differ in length."""
    columns = group.response_ids, group.logprobs, group.response_mask, group.response_model_steps
    lengths = [*map(_lengths, columns)]
    if lengths.count(lengths[0]) + lengths.count([0] * len(group.status)) >= len(lengths):
        return {}
    doubts: dict[str, str] = {}
    for index, found in enumerate(zip(*lengths, strict=True)):
        of_these = group.input_ids[index] is None and group.labels[index] is None  # these two may be of other tokens
        if of_these and found[0] and len({0, *found}) > 2:
            listed = ", ".join(f"{length} {name}" for length, name in zip(found, BY_TOKEN, strict=True) if length)
            doubts["lengths"] = f"has {listed} in rollouts[{index}], which should be of the same tokens: the response's"
    return doubts


def _lengths(values: Sequence[Any]) -> list[int]:
    return [*map(len if _LISTS.issuperset(map(type, values)) else _length, values)]


def _length(value: Any) -> int:
    try:
        return 0 if value is None else len(value)
    except (TypeError, OverflowError):  # a value without a length, or with a huge one
        return 0


def _check_dated(group: GroupFields) -> dict[str, str]:
    """Return a doubt if the group has responses, and none of its rollouts has model steps."""
    if any(oldest is not None for oldest, _ in group.ranges()):
        return {}
    if not any(map(is_text, group.response)) and not any(map(_length, group.response_ids)):
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
        each = [int(value or 0) for value in group.seq_staleness]
    else:
        each = [staleness_of(oldest, train_step) for oldest, _ in group.ranges()]
        if group.seq_staleness != each:
            group.seq_staleness = kind.set_all(rollouts, "seq_staleness", each)
    staleness = max(each)
    if abs(staleness) >= MAX_STEP:
        raise RolloutError(f"seq_staleness is {staleness:.4g}, which is no number of training steps")
    if status not in EXPIRING_STATUSES:
        return Normalised(status, staleness, train_step, fields=group)
    if rule.token_stale_threshold is not None and (index := unmatched(group)) is not None:
        raise RolloutError(
            f"rollouts[{index}] has more response_model_steps than places in its response_mask; both, and "
            "response_ids, must be of the same tokens: those of the response"
        )
    expired = find_expired(group, rule, train_step, each)
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
        _mask(rollouts, kind, through)
    if not expired:
        return Normalised(status, staleness, train_step, fields=group if through is None else None)
    return Normalised(Status.EXPIRED, staleness, None)


def _mask(rollouts: Sequence[Any], kind: RolloutType, through: int) -> None:
    """Mask out the tokens that are too old. Raises RolloutError for a response whose age is unknown."""
    if (index := undated(GroupFields.of(rollouts, kind))) is not None:
        raise RolloutError(
            f"rollouts[{index}] has a response without response_model_steps, so token_stale_threshold can't tell how "
            "old its tokens are; give put the model_step of the weights that wrote them, or no token_stale_threshold"
        )
    mask_stale_tokens(rollouts, through, kind)


def _status_of(rollouts: Sequence[Any], group: GroupFields, kind: RolloutType) -> Status:
    """Return the status of a group. Finished rollouts whose status was never set become COMPLETED."""
    if {*map(type, group.status)} == {Status}:
        status = group_status(group.status)
    else:
        statuses = []
        for index, rollout in enumerate(rollouts):
            try:
                statuses.append(kind.status(rollout))
            except RolloutError as error:
                raise RolloutError(f"rollouts[{index}].{error}") from None
        status = group_status(statuses)
    if status != Status.INIT or not is_finished(group) or any(map(kind.says_status, rollouts)):
        return status
    for rollout in rollouts:
        kind.set_status(rollout, Status.COMPLETED)
    group.status = [kind.get(rollout, "status") for rollout in rollouts]
    return Status.COMPLETED


def is_finished(group: GroupFields | None) -> bool:
    """Return whether all rollouts have a response and a reward."""
    return group is not None and all(
        reward is not None and not (text is None and tokens is None)
        for reward, text, tokens in zip(group.reward, group.response, group.response_ids, strict=True)
    )
