"""What became of a group that an agent loop has returned."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from replaybuf.checks import Tags
from replaybuf.errors import RolloutError
from replaybuf.prompts.ledger import begin_anew
from replaybuf.rollouts.rollout import Status, group_status
from replaybuf.rollouts.rollout_type import get_field, set_field

#: The tag that counts how often a group was interrupted.
INTERRUPTED = "interrupted"


def judge(group: Sequence[Any]) -> Status:
    """What became of a group, by its rollouts. Raises RolloutError for what no agent loop may return."""
    if not group:
        raise RolloutError("generate_group returned an empty group")
    statuses = []
    for place, rollout in enumerate(group):
        try:
            statuses.append(Status(get_field(rollout, "status")))
        except ValueError:
            raise RolloutError(f"generate_group returned a rollout ([{place}]) without a known status") from None
    status = group_status(statuses)
    if status in (Status.INIT, Status.EXPIRED, Status.ARCHIVED):
        raise RolloutError(
            f"generate_group returned a group that is {status}: its rollouts must be completed, failed, filtered or "
            "aborted"
        )
    return status


def count_tokens(group: Sequence[Any]) -> int:
    """The number of response tokens of a group, as far as can be told."""
    count = 0
    for rollout in group:
        with contextlib.suppress(TypeError):
            count += len(get_field(rollout, "response_ids"))
    return count


def times_interrupted(tags: Tags) -> int:
    """How often a group with these tags was interrupted."""
    count = tags.get(INTERRUPTED, 0)
    return count if isinstance(count, int) else 0


def begin_anew_later(group: Sequence[Any]) -> None:
    """Take from interrupted rollouts what they have; they stay ABORTED."""
    aborted = [rollout for rollout in group if get_field(rollout, "status") == Status.ABORTED]
    begin_anew(aborted)
    for rollout in aborted:
        set_field(rollout, "status", Status.ABORTED)


def error_of(group: Sequence[Any]) -> str:
    """What the rollouts say went wrong."""
    texts = [str(text) for rollout in group if (text := get_field(rollout, "error_msg"))]
    return texts[0] if texts else "its rollouts have the status failed, and no error_msg"


def is_cancelled() -> bool:
    """Whether somebody has cancelled this task: an agent loop may raise CancelledError of its own, as a failure."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def text_of(error: BaseException) -> str:
    """An error for people, on one line with its kind."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
