"""Attributes of the tracing spans of buffer calls: tasks, numbers and steps, never the content of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replaybuf.buffer.tracing import Attributes

if TYPE_CHECKING:
    from replaybuf.storage.values import Checkpoint, Leased

#: The attribute of each argument, and how its value is made.
_ARGUMENTS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "task_name": ("task", str),
    "items": ("rollouts", len),
    "model_step": ("model_step", int),
    "current_train_step": ("train_step", int),
    "train_step": ("train_step", int),
    "step": ("train_step", int),
    "keep_new": ("keep_new", bool),
    "task_stale_thresholds": ("tasks", list),
    "failed": ("failed", bool),
}


def of_call(given: Mapping[str, Any]) -> Attributes:
    """Return the attributes of a call of a buffer, a lease or a draw, by its arguments."""
    me, arguments = given["self"], {**given, **given.get("options", {})}
    storage = arguments.get("storage")  # an empty one is false
    made: dict[str, Any] = {"buffer": (me.storage if storage is None else storage).name}
    for name, (called, convert) in _ARGUMENTS.items():
        if arguments.get(name) is not None:
            made[called] = convert(arguments[name])
    if (token := getattr(me, "token", None)) is not None:
        made["lease"] = token
    if "uids" in arguments:
        chosen = me.open if arguments["uids"] is None else arguments["uids"]
        made["groups"] = len(chosen) if hasattr(chosen, "__len__") else None
    if (draw := getattr(me, "draw", None)) is not None:
        made |= {"tasks": list(draw.sizes), "sizes": list(draw.sizes.values()), "status": str(draw.status)}
        made |= {"queried": draw.where is not None, "train_step": draw.train_step, "worker": draw.worker}
    return made


def of_uid(uid: int | None) -> Attributes:
    return {"uid": uid, "stored": uid is not None}


def of_drawn(drawn: Mapping[str, Sequence[Any]]) -> Attributes:
    items = [item for items in drawn.values() for item in items]
    return {
        "groups": len(items),
        "replayed": sum(item.times_sampled > 1 for item in items),
        "max_staleness": max((item.staleness for item in items), default=None),
    }


def of_leased(leased: Leased) -> Attributes:
    return {**of_drawn(leased.items), "lease": leased.token}


def of_expired(expired: Mapping[str, int]) -> Attributes:
    return {"expired": sum(expired.values())}


def of_checkpoint(made: Checkpoint) -> Attributes:
    return {"groups": made.groups}
