"""Attributes of the tracing spans of buffer calls: tasks, numbers and steps, never the content of rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from replaybuf.tracing import Attributes

if TYPE_CHECKING:
    from replaybuf.buffer.drawing import DrawRequest
    from replaybuf.buffer.lease import Lease
    from replaybuf.buffer.replay_buffer import ReplayBuffer
    from replaybuf.storage.sql.backend import SQLStorage
    from replaybuf.storage.values import Checkpoint, Leased


def of_put(
    self: ReplayBuffer[Any],
    items: Sequence[Any],
    task_name: str,
    *,
    model_step: int | None = None,
    current_train_step: int | None = None,
    **_: Any,
) -> Attributes:
    return {
        **_of(self.storage),
        "task": task_name,
        "rollouts": len(items),
        "model_step": model_step,
        "train_step": current_train_step,
    }


def of_uid(uid: int | None) -> Attributes:
    return {"uid": uid, "stored": uid is not None}


def of_draw(self: DrawRequest, storage: SQLStorage, waits: object, seconds: float | None = None) -> Attributes:
    draw = self.draw
    return {
        **_of(storage),
        "tasks": list(draw.sizes),
        "sizes": list(draw.sizes.values()),
        "status": str(draw.status),
        "queried": draw.where is not None,
        "train_step": draw.train_step,
        "worker": draw.worker,
    }


def of_drawn(drawn: Mapping[str, Sequence[Any]]) -> Attributes:
    items = [item for items in drawn.values() for item in items]
    return {
        "groups": len(items),
        "replayed": sum(item.times_sampled > 1 for item in items),
        "max_staleness": max((item.staleness for item in items), default=None),
    }


def of_leased(leased: Leased) -> Attributes:
    return {**of_drawn(leased.items), "lease": leased.token}


def of_settling(
    self: Lease[Any], uids: Iterable[int] | None = None, *, failed: str | None = None, train_step: int | None = None
) -> Attributes:
    chosen = self.open if uids is None else uids
    groups = len(chosen) if isinstance(chosen, Sized) else None
    return {
        **_of(self._storage),
        "lease": self.token,
        "groups": groups,
        "failed": failed is not None,
        "train_step": train_step,
    }


def of_result(
    self: Lease[Any], items: Sequence[Any], task_name: str, *, replaces: Iterable[int], **_: Any
) -> Attributes:
    return {**_of(self._storage), "lease": self.token, "task": task_name, "rollouts": len(items)}


def of_refresh(
    self: ReplayBuffer[Any], *, task_stale_thresholds: Mapping[str, Any], current_train_step: int, **_: Any
) -> Attributes:
    return {**_of(self.storage), "tasks": list(task_stale_thresholds), "train_step": current_train_step}


def of_expired(expired: Mapping[str, int]) -> Attributes:
    return {"expired": sum(expired.values())}


def of_step(self: ReplayBuffer[Any], step: int) -> Attributes:
    return {**_of(self.storage), "train_step": step}


def of_restore(self: ReplayBuffer[Any], step: int, *, keep_new: bool = False) -> Attributes:
    return {**of_step(self, step), "keep_new": keep_new}


def of_checkpoint(made: Checkpoint) -> Attributes:
    return {"groups": made.groups}


def _of(storage: Any) -> Attributes:
    return {"buffer": storage.name}
