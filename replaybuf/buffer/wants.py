"""What a call waits for, as plain values; and whether it could ever be there."""

from __future__ import annotations

import math

from replaybuf.errors import InputError
from replaybuf.query import to_text
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.circumstances import Wait
from replaybuf.rules.limits import Limits
from replaybuf.storage.values import Draw, NewGroup


def wait_of(draw: Draw, since: float, timeout: float) -> Wait:
    """Return the wait of a draw."""
    wants = {task: least for task, least in draw.at_least.items() if least}
    query = None if draw.where is None else to_text(draw.where)
    more = any(draw.sizes[task] > least for task, least in wants.items())
    return Wait(wants, "groups", draw.status, query, draw.worker, since, end_of(since, timeout), at_least=more)


def wait_for_room(new: NewGroup, count: int, since: float, timeout: float) -> Wait:
    """Return the wait of `count` puts of a task and status."""
    wants = {new.task_name: count}
    return Wait(wants, "room", new.status, worker=new.worker, since=since, deadline=end_of(since, timeout))


def end_of(since: float, timeout: float) -> float | None:
    """Return when a wait is over; None if never."""
    return None if math.isinf(timeout) else since + timeout


def check_possible(draw: Draw, limits: Limits) -> None:
    """Raise InputError for a draw that needs more groups than the limits can ever deliver at once."""
    if draw.status != Status.COMPLETED:
        return
    largest = limits.largest_batch
    for task, size in draw.at_least.items():
        if largest is None or size <= largest:
            continue
        if limits.capacity is not None and size > limits.capacity:
            why = f"the capacity is {limits.capacity}"
        else:
            wide = "a range of twice" if isinstance(limits.error_buffer, tuple) else "at least"
            why = f"{limits.rate} allows {largest} at most; set error_buffer to {wide} the size of a batch"
        raise InputError(f"a batch of {size} groups of task {task} would wait for ever: {why}")
