"""The parts of the installed xtuner that are used: its rollouts and statuses, and the release of their sessions."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from replaybuf.errors import MissingDriverError
from replaybuf.rollouts.rollout import Status

_DATA = "xtuner.v1.data_proto.rl_data"
_SESSIONS = "xtuner.v1.rl.rollout.trace_store"
_BUFFERS = "xtuner.v1.rl.replay_buffer"

#: The file in which xtuner's own buffer is saved.
THEIR_FILE = "replay_buffer.pth"


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "xtuner":
            why = "which is not installed: get it from https://github.com/InternLM/xtuner and pip install it"
        else:
            why = f"and can't import {name}: {error}"
        raise MissingDriverError(f"replaybuf.xtuner works with xtuner, {why}") from error


def rollout_class() -> type[Any]:
    """Return xtuner's RolloutState. Raises MissingDriverError."""
    found: type[Any] = _module(_DATA).RolloutState
    return found


def their_status(status: Enum) -> Any:
    """Return the member of xtuner's Status that means the same as one of ours, or as one of theirs."""
    return _module(_DATA).Status(status.value)


async def release(groups: Sequence[list[Any]]) -> None:
    """Release the resources of rollouts, and set their status EXPIRED: sessions of the trace store, Ray objects.

    One call for all of them, as their sessions are released by one remote call. Their other fields are reset.
    """
    if not groups:
        return
    await _module(_SESSIONS).release_and_discard_rollout_groups(list(groups))
    expired = their_status(Status.EXPIRED)
    for group in groups:
        for rollout in group:
            rollout.status = expired


def config_class(name: str) -> type[Any]:
    """Return xtuner's class of configs of this name, or `object` where xtuner isn't installed."""
    if find_spec("xtuner") is None:
        return object
    found: type[Any] = getattr(_module(_BUFFERS), name)
    return found
