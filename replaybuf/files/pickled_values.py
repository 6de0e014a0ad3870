"""Saved buffers of xtuner and other pickles of rollouts: converts records of a pickle to trees, and trees to groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from replaybuf.codec import extension_types as ext
from replaybuf.codec.extension_types import TaggedValue
from replaybuf.codec.numpy_arrays import simple_dtype
from replaybuf.codec.torch_tensors import StoredTensor
from replaybuf.errors import FileError
from replaybuf.files.foreign_rows import ColumnMapping, foreign_groups
from replaybuf.files.pickles import STATUS, PickledName, PickledObject, loaded, record_fields
from replaybuf.files.row_format import FileGroup, Placed
from replaybuf.rollouts.rollout import Status


class TreeBuilder:
    """Converts the records of a pickle to trees, with memory in proportion to the file's `size`.

    FileError when the pickle would need more because it refers to the same values repeatedly: items, and bytes of
    texts, arrays and tensors, are counted.
    """

    def __init__(self, size: int) -> None:
        self._items = 1_000_000 + 8 * size
        self._bytes = (128 << 20) + 64 * size  # the rollouts of a group share their prompt, an image perhaps

    def tree(self, value: Any) -> Any:
        """Return a value as a tree. Raises FileError."""
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            self.spend(0, len(value))
            if kind is list and value and _are_small(value):
                return list(value)
            items = [self.tree(item) for item in value]
            return items if kind is list else TaggedValue(_MARKS[kind], items)
        if kind is dict:
            self.spend(0, len(value))
            return self.names(value.items())
        if kind is int:
            if -(2**63) <= value < 2**64:
                return value
            self.spend(value.bit_length() // 8)
            return TaggedValue(ext.INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        if kind in _SMALL:
            return value
        if kind is str or kind is bytes:
            self.spend(len(value))
            return value
        if kind is bytearray:
            self.spend(len(value))
            return TaggedValue(ext.BYTEARRAY, bytes(value))
        if kind is complex:
            return TaggedValue(ext.COMPLEX, [value.real, value.imag])
        if kind is PickledObject:
            return self._made(value)
        raise FileError(f"the pickle holds a {kind.__name__} by itself, which is no data of rollouts")

    def names(self, pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return pairs of names and values as a tree. Raises FileError."""
        try:
            return {self.tree(name): self.tree(item) for name, item in pairs}
        except TypeError as error:
            raise FileError(f"the pickle has a dict with a name that can't be one ({error!s:.100})") from error

    def _made(self, made: PickledObject) -> Any:
        if made.name.startswith("xtuner."):
            return self._record(made)
        rebuild = REBUILDERS.get(made.name)
        if rebuild is None:
            raise FileError(f"the pickle makes a {made.name!r:.100}, which is no value of rollouts")
        try:
            return rebuild(self, made)
        except FileError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise FileError(f"the pickle's {made.name} is damaged ({error!s:.100})") from error

    def _record(self, made: PickledObject) -> Any:
        if made.name.endswith(f".{STATUS}"):
            return _status(made)
        fields = record_fields(made)
        if made.name.endswith(".SerializedRayObjectRef"):
            return self.tree(fields.get("value"))
        return self.tree(fields)

    def spend(self, nbytes: int, items: int = 0) -> None:
        """Count the bytes of a value, or its items. FileError when there are too many."""
        self._bytes -= nbytes
        self._items -= items
        if min(self._items, self._bytes) < 0:
            raise FileError(
                "the pickle refers to the same values again and again: unfolded, they would fill the memory. If you "
                "trust the file, load it with its own program, and export its rollouts as JSONL or Parquet"
            )


def _are_small(values: list[Any]) -> bool:
    """Return whether values are numbers of ordinary size."""
    kinds = set(map(type, values))
    return kinds == {float} or (kinds <= {bool, int, float} and min(values) >= -(2**63) and max(values) < 2**64)


_SMALL: Final = frozenset({type(None), bool, float})
_MARKS: Final[dict[type, int]] = {
    tuple: ext.TUPLE,
    set: ext.SET,
    frozenset: ext.FROZENSET,
}


def _status(made: PickledObject) -> Status:
    given = made.args[0] if made.args else None
    if type(given) is not str or given not in set(Status):
        raise FileError(f"the pickle's {made.name} is {given!r:.60}; expected one of {', '.join(Status)}")
    return Status(given)


def _iterable(self: TreeBuilder, made: PickledObject) -> list[Any]:
    items = [*(made.args[0] if made.args else ()), *made.items]
    self.spend(0, len(items))
    if any(isinstance(item, PickledObject | PickledName) for item in items) and made.name.endswith("set"):
        raise ValueError("its items can't be in a set")
    return items


def _set(self: TreeBuilder, made: PickledObject) -> Any:
    number = ext.SET if made.name == "builtins.set" else ext.FROZENSET
    return TaggedValue(number, [self.tree(item) for item in _iterable(self, made)])


def _mapping(self: TreeBuilder, made: PickledObject) -> Any:
    default = made.name.endswith("defaultdict")
    given = made.args[int(default) :]
    pairs = [*(given[0].items() if given and isinstance(given[0], dict) else given[0] if given else ()), *made.pairs]
    self.spend(0, len(pairs))
    tree = self.names(pairs)
    return tree if default else TaggedValue(ext.ORDERED_DICT, tree)


def _encoded(self: TreeBuilder, made: PickledObject) -> Any:
    text, encoding = made.args
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes in {encoding!r:.40}")
    self.spend(len(text))
    return str.encode(text, "latin-1")


def _bytearray(self: TreeBuilder, made: PickledObject) -> Any:
    [content] = made.args[:1] or (b"",)
    content = self.tree(content)
    if type(content) is str and made.args[1:] == ("latin-1",):
        content = content.encode("latin-1")
    return TaggedValue(ext.BYTEARRAY, bytes(content) if type(content) is bytes else _refuse("its content is no bytes"))


def _refuse(why: str) -> Any:
    raise ValueError(why)


def _dtype(made: Any) -> np.dtype[Any]:
    """Return the numpy dtype of a record."""
    if type(made) is not PickledObject or made.name != "numpy.dtype":
        raise ValueError("no dtype of numpy")
    text, order = str(made.args[0]), "|"
    if isinstance(made.state, tuple):
        order = str(made.state[1])
        if made.state[3] is not None:
            raise ValueError("an array of records, which this reader doesn't know")
    if text.startswith("O"):
        raise ValueError("an array of Python objects, which this reader doesn't know")
    described = np.dtype(text).str.lstrip("<>=|")
    big = ">" if order == ">" and np.dtype(text).itemsize > 1 else ""
    described = np.dtype(big + described).str
    return simple_dtype(described)


def _array(self: TreeBuilder, made: PickledObject) -> Any:
    state = made.state
    _, shape, dtype, fortran, raw = state
    raw = self.tree(raw)
    kind = _dtype(dtype)
    if type(raw) is not bytes:
        raise ValueError("its items are no bytes")
    array = np.frombuffer(raw, kind)
    if array.size != int(np.prod(shape, dtype=object)) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape {shape!r:.60} for {array.size} items")
    return np.ascontiguousarray(array.reshape(shape, order="F" if fortran else "C")).copy()


def _scalar(self: TreeBuilder, made: PickledObject) -> Any:
    kind, raw = _dtype(made.args[0]), self.tree(made.args[1])
    if len(raw) != kind.itemsize:
        raise ValueError("its size is another one")
    return TaggedValue(ext.SCALAR, [kind.str, raw])


def _frombuffer(self: TreeBuilder, made: PickledObject) -> Any:
    raw, dtype, shape, order = made.args
    state = (1, shape, dtype, order == "F", bytes(raw) if isinstance(raw, bytes | bytearray) else self.tree(raw))
    made.state = state
    return _array(self, made)


def _tensor(self: TreeBuilder, made: PickledObject) -> Any:
    storage, offset, size, stride, *rest = made.args
    dtype = rest[2].text.removeprefix("torch.") if made.name.endswith("_v3") and type(rest[2]) is PickledName else None
    if made.name.endswith("_v3") and dtype is None:
        _refuse(f"no dtype of torch: {rest[2]!r:.60}")
    tensor: StoredTensor = storage.tensor(offset, tuple(size), tuple(stride), dtype, bool(rest and rest[0] is True))
    self.spend(len(tensor.content[2]))
    return tensor


def _parameter(self: TreeBuilder, made: PickledObject) -> Any:
    tensor = self.tree(made.args[0])
    name, shape, items, _ = tensor.content
    return StoredTensor([name, shape, items, 2 + int(made.args[1] is True)])


#: Functions that convert a record to a tree, by the record's name in the pickle. Records of other names aren't data.
REBUILDERS: Final[dict[str, Callable[[TreeBuilder, PickledObject], Any]]] = {
    "builtins.set": _set,
    "builtins.frozenset": _set,
    "builtins.bytearray": _bytearray,
    "builtins.complex": lambda self, made: TaggedValue(ext.COMPLEX, [float(part) for part in made.args]),
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": _mapping,
    "builtins.list": lambda self, made: [self.tree(item) for item in _iterable(self, made)],
    "builtins.int": lambda self, made: 0,
    "builtins.float": lambda self, made: 0.0,
    "_codecs.encode": _encoded,
    "numpy.dtype": lambda self, made: _refuse("a dtype by itself"),
    "numpy.ndarray": lambda self, made: _refuse("an array without its content"),
    "numpy.core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _frombuffer,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": lambda self, made: TaggedValue(ext.TUPLE, [int(n) for n in _iterable(self, made)]),
}


def read_saved(path: Path, mapped: ColumnMapping) -> Iterator[FileGroup]:
    """Yield the groups of a file of `torch.save` or `pickle.dump`: a saved buffer, or a list of rollouts or groups.

    The whole file is in memory meanwhile, once. Raises FileError.
    """
    with loaded(path, REBUILDERS.keys()) as (value, size):
        if isinstance(value, Mapping) and "storage_state" in value:
            yield from _buffer(value, TreeBuilder(size), mapped)
        elif isinstance(value, list):
            yield from foreign_groups(_rows(value, TreeBuilder(size)), mapped)
        else:
            what = value.name if type(value) is PickledObject else type(value).__name__
            raise FileError(
                f"the pickle holds a {what}; expected a saved buffer of xtuner (a dict with storage_state), or a list "
                "of rollouts or of groups"
            )


def _buffer(state: Mapping[str, Any], rebuilding: TreeBuilder, mapped: ColumnMapping) -> Iterator[FileGroup]:
    kept = state["storage_state"]
    items = kept.get("items") if isinstance(kept, Mapping) else None
    if not isinstance(items, list):
        raise FileError(
            f"the buffer was saved by xtuner's {state.get('storage')!s:.60}, and only those of NaiveStorage (that of "
            "its configs) can be read: it has no list of items"
        )
    for number, item in enumerate(items, 1):
        place = f"group {number}"
        if type(item) is not PickledObject or not item.name.endswith(".StorageItem"):
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


def _rows(values: list[Any], rebuilding: TreeBuilder) -> Iterator[Placed]:
    """Yield the rollouts or groups in a list as rows."""
    for number, value in enumerate(values, 1):
        place, tree = f"item {number}", rebuilding.tree(value)
        if type(tree) is list:
            yield place, {"rollouts": tree}
        elif type(tree) is dict and all(type(name) is str for name in tree):
            yield place, tree
        else:
            raise FileError(f"{place} is a {type(value).__name__}; expected a dict with the fields of a rollout")
