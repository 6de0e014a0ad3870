"""The portable state of a store: what `state_dict` gives and every backend can load.

Groups are written as a reader would get them: expired responses are already reset and staleness is a plain number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from replaybuf.errors import NotEmptyError, SnapshotMismatchError
from replaybuf.rollout import Status
from replaybuf.storage.base import StorageItem

FORMAT = "replaybuf-state-1"

_METADATA = [f.name for f in fields(StorageItem) if f.name != "item"]


def pack_state(items: Iterable[tuple[StorageItem, bytes]], next_uid: int, dropped: dict[str, int]) -> dict[str, Any]:
    """The state dict of these groups, each with its payload."""
    groups = [
        {name: _plain(getattr(item, name)) for name in _METADATA} | {"payload": payload} for item, payload in items
    ]
    return {"format": FORMAT, "groups": groups, "next_uid": next_uid, "dropped": dict(dropped)}


def unpack_state(state: dict[str, Any]) -> tuple[list[tuple[StorageItem, bytes]], int, dict[str, int]]:
    """The groups with their payloads, the next uid and the dropped counts of a state dict.

    Raises SnapshotMismatchError for anything else.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise SnapshotMismatchError(f"expected a state dict of format {FORMAT!r}, got {found!r}")
    try:
        groups = [
            (
                StorageItem(**{name: record[name] for name in _METADATA} | {"status": Status(record["status"])}),
                bytes(record["payload"]),
            )
            for record in state["groups"]
        ]
        return groups, int(state["next_uid"]), {str(k): int(v) for k, v in state["dropped"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotMismatchError(f"the state dict is incomplete or damaged: {error!r}") from error


def check_empty(count: int) -> None:
    """Raise NotEmptyError unless there are no groups."""
    if count:
        raise NotEmptyError(
            f"the buffer holds {count} groups: resume into an empty buffer, or go on with this one as it is "
            "(an opened database already has everything that was committed)"
        )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Status) else value
