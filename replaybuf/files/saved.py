"""Saved buffers of xtuner, and other pickles of rollouts: their groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replaybuf.errors import FileError
from replaybuf.files.foreign import Mapped, foreign_groups
from replaybuf.files.rebuilding import Rebuilding
from replaybuf.files.records import Made, record_fields
from replaybuf.files.rows import FileGroup, Placed
from replaybuf.files.torch_files import loaded
from replaybuf.rollouts.rollout import Status


def read_saved(path: Path, mapped: Mapped) -> Iterator[FileGroup]:
    """Yield the groups of a file of `torch.save` or `pickle.dump`: a saved buffer, or a list of rollouts or groups.

    All of the file is in memory meanwhile, once. Raises FileError.
    """
    with loaded(path) as (value, size):
        if isinstance(value, Mapping) and "storage_state" in value:
            yield from _buffer(value, Rebuilding(size), mapped)
        elif isinstance(value, list):
            yield from foreign_groups(_rows(value, Rebuilding(size)), mapped)
        else:
            what = value.name if type(value) is Made else type(value).__name__
            raise FileError(
                f"the pickle holds a {what}; expected a saved buffer of xtuner (a dict with storage_state), or a list "
                "of rollouts or of groups"
            )


def _buffer(state: Mapping[str, Any], rebuilding: Rebuilding, mapped: Mapped) -> Iterator[FileGroup]:
    kept = state["storage_state"]
    items = kept.get("items") if isinstance(kept, Mapping) else None
    if not isinstance(items, list):
        raise FileError(
            f"the buffer was saved by xtuner's {state.get('storage')!s:.60}, and only those of NaiveStorage (that of "
            "its configs) can be read: it has no list of items"
        )
    for number, item in enumerate(items, 1):
        place = f"group {number}"
        if type(item) is not Made or not item.name.endswith(".StorageItem"):
            raise FileError(f"{place} is no StorageItem of xtuner")
        fields = record_fields(item)
        rollouts = rebuilding.tree(fields.get("item"))
        if type(rollouts) is not list or not rollouts or any(type(one) is not dict for one in rollouts):
            raise FileError(f"{place}: item is no list of RolloutStates")
        status, staleness = rebuilding.tree(fields.get("status")), fields.get("staleness")
        if type(status) is not Status or type(staleness) is not int:
            raise FileError(f"{place}: status is {status!r:.60} and staleness {staleness!r:.60}")
        task = fields.get("task_name") or mapped.task
        if type(task) is not str:
            raise FileError(f"{place}: task_name is {task!r:.60}; expected a text")
        for one in rollouts:
            if one.get("uid") is None:
                one["uid"] = one.get("rollout_id")
        yield FileGroup(place, task, mapped.status or status, rollouts, staleness=staleness)


def _rows(values: list[Any], rebuilding: Rebuilding) -> Iterator[Placed]:
    """Yield the rollouts or groups in a list as rows."""
    for number, value in enumerate(values, 1):
        place, tree = f"item {number}", rebuilding.tree(value)
        if type(tree) is list:
            yield place, {"rollouts": tree}
        elif type(tree) is dict and all(type(name) is str for name in tree):
            yield place, tree
        else:
            raise FileError(f"{place} is a {type(value).__name__}; expected a dict with the fields of a rollout")
