"""How a batch is divided among tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from replaybuf.checks import check_by_task, check_task_name, whole
from replaybuf.errors import InputError


def batch_sizes(weights: Mapping[str, float], batch_size: int) -> dict[str, int]:
    """Return how many groups of a batch each task gets: in proportion to its weight, and `batch_size` in all.

    What rounding leaves over goes to the tasks that lost most by it, the first of equal ones. A weight of 0 gives none.
    Raises InputError for weights that aren't finite numbers of at least 0, with one above 0.
    """
    size, known = whole(batch_size), check_by_task(weights, "weights")
    if size is None or size < 0:
        raise InputError(f"batch_size must be a whole number of at least 0, got {batch_size!r:.100}")
    for task, weight in known.items():
        _check_weight(check_task_name(task), weight)
    largest = max(known.values(), default=0)
    if not largest:
        raise InputError("the weight of at least one task must be above 0")
    shares = {task: weight / largest for task, weight in known.items()}  # whose sum is finite
    exact = {task: size * share / math.fsum(shares.values()) for task, share in shares.items()}
    sizes = {task: math.floor(number) for task, number in exact.items()}
    by_loss = sorted(exact, key=lambda task: sizes[task] - exact[task])
    for task in by_loss[: size - sum(sizes.values())]:
        sizes[task] += 1
    return sizes


def _check_weight(task: str, weight: Any) -> None:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise InputError(f"the weight of task {task!r:.100} must be a number of at least 0, got {weight!r:.100}")
