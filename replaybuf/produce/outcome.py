"""The outcome of a group that an agent loop has returned."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from replaybuf.checks import Tags
from replaybuf.errors import RolloutError
from replaybuf.prompts.prompt import begin_anew
from replaybuf.rollouts.rollout import Status, group_status
from replaybuf.rollouts.rollout_type import RolloutType

#: The tag that counts how often a group was interrupted.
INTERRUPTED = "interrupted"


def judge(group: Sequence[Any], kind: RolloutType) -> Status:
    """Return the status of a group, by its rollouts. Raises RolloutError for results that no agent loop may return."""
    if not group:
        raise RolloutError("generate_group returned an empty group")
    statuses = []
    for place, rollout in enumerate(group):
        try:
            kind.check_class(rollout)
            statuses.append(kind.status(rollout))
        except RolloutError as error:
            raise RolloutError(f"generate_group returned a rollout ([{place}]) that can't be stored: {error}") from None
    status = group_status(statuses)
    if status in (Status.INIT, Status.EXPIRED, Status.ARCHIVED):
        raise RolloutError(
            f"generate_group returned a group that is {status}: its rollouts must be completed, failed, filtered or "
            "aborted"
        )
    return status


def count_tokens(group: Sequence[Any], kind: RolloutType) -> int:
    """Return the number of response tokens of a group, as far as it is known."""
    count = 0
    for rollout in group:
        with contextlib.suppress(AttributeError, TypeError):
            count += len(kind.get(rollout, "response_ids"))
    return count


def times_interrupted(tags: Tags) -> int:
    """Return how often a group with these tags was interrupted."""
    count = tags.get(INTERRUPTED, 0)
    return count if isinstance(count, int) else 0


def begin_anew_later(group: Sequence[Any], kind: RolloutType) -> None:
    """Remove what interrupted rollouts have generated; they stay ABORTED."""
    aborted = [rollout for rollout in group if kind.status(rollout) == Status.ABORTED]
    begin_anew(aborted, kind)
    for rollout in aborted:
        kind.set_status(rollout, Status.ABORTED)


def error_of(group: Sequence[Any], kind: RolloutType) -> str:
    """Return the errors that the rollouts report."""
    texts = [str(text) for rollout in group if (text := kind.get(rollout, "error_msg"))]
    return texts[0] if texts else "its rollouts have the status failed, and no error_msg"


def is_cancelled() -> bool:
    """Return whether this task was cancelled. An agent loop may also raise its own CancelledError, as a failure."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def text_of(error: BaseException) -> str:
    """Return an error and its class on one line, for people."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
