"""A group of a file as every store takes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from replaybuf.checks import (
    check_count,
    check_key,
    check_priority,
    check_staleness,
    check_step,
    check_storable,
    check_tags,
    check_task_name,
)
from replaybuf.codec.payload import Codec
from replaybuf.errors import FileError, ReplayBufError, RolloutError
from replaybuf.files.exporting import TREES
from replaybuf.files.rows import FileGroup
from replaybuf.rollouts.marks import Marks
from replaybuf.rollouts.outline import outline, prompt_preview
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.storage.values import NewGroup
from replaybuf.worker_name import check_worker


def prepared(group: FileGroup, codec: Codec) -> NewGroup:
    """Return a group as every store takes it, checked. Raises FileError, which says where in the file it is."""
    try:
        payload = TREES.encode(group.rollouts)
        new = NewGroup(
            task_name=check_task_name(group.task_name),
            status=group.status,
            staleness=check_staleness(group.staleness),
            rollouts=codec.decode(payload),
            created_at=time.time() if group.created_at is None else float(group.created_at),
            priority=check_priority(group.priority),
            tags=check_tags(group.tags),
            key=check_key(group.key),
            payload=payload,
            times_sampled=check_count(group.times_sampled, "times_sampled"),
            deliveries=check_count(group.deliveries, "deliveries"),
            error=None if group.error is None else check_storable(group.error, "error"),
            worker=None if group.worker is None else check_worker(group.worker),
            trained_step=None if group.trained_step is None else check_step(group.trained_step, "trained_step"),
        )
        _check_rollouts(new.rollouts, codec.rollout_type)
    except (ReplayBufError, ArithmeticError) as error:
        raise FileError(f"{group.place}: {error}") from error
    return new


def _check_rollouts(rollouts: Sequence[Any], kind: RolloutType) -> None:
    """Raise what a put would, which makes marks and an outline of rollouts: their fields can hold anything."""
    try:
        for one in rollouts:
            check_staleness(int(kind.get(one, "seq_staleness") or 0), "seq_staleness")
        Marks.of(rollouts, kind)
        outline(rollouts, kind)
        prompt_preview(rollouts, kind)
    except ReplayBufError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise RolloutError(f"the rollouts have a field that no store can take ({error!s:.150})") from error
