"""All that is used of the installed xtuner: its rollouts, its statuses, the bases of its configs, released sessions."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from replaybuf.errors import MissingDriverError
from replaybuf.values.rollouts.rollout import Status

_DATA = "xtuner.v1.data_proto.rl_data"
_SESSIONS = "xtuner.v1.rl.rollout.trace_store"
_BUFFERS = "xtuner.v1.rl.replay_buffer"

#: The file written by xtuner's own buffer.
THEIR_FILE = "replay_buffer.pth"


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "xtuner":
            why = "which is not installed: get it from https://github.com/InternLM/xtuner and pip install it"
        else:
            why = f"and can't import {name}: {error}"
        raise MissingDriverError(f"replaybuf.integrations.xtuner works with xtuner, {why}") from error


def rollout_class() -> type[Any]:
    """Return xtuner's RolloutState. Raises MissingDriverError."""
    found: type[Any] = _module(_DATA).RolloutState
    return found


def their_status(status: Enum) -> Any:
    """Return the member of xtuner's Status that corresponds to one of ours; one of theirs is returned as it is."""
    return _module(_DATA).Status(status.value)


async def release(groups: Sequence[list[Any]]) -> None:
    """Release the resources of rollouts (sessions of the trace store, Ray objects), and reset them to EXPIRED.

    One call for all groups, since their sessions are released by one remote call.
    """
    if not groups:
        return
    await _module(_SESSIONS).release_and_discard_rollout_groups(list(groups))
    expired = their_status(Status.EXPIRED)
    for group in groups:
        for rollout in group:
            rollout.status = expired


def config_class(name: str) -> type[Any]:
    """Return xtuner's config class of this name, or `object` if xtuner isn't installed."""
    if find_spec("xtuner") is None:
        return object
    found: type[Any] = getattr(_module(_BUFFERS), name)
    return found
