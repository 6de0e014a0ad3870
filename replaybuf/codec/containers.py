"""Containers and small values of the standard library in payloads: both ways of each.

Ranges, deques, the dicts of `collections`, paths and memoryviews. Contents that may be hostile are checked before
anything is made of them; what they name is looked up in the tables below.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Final

from replaybuf.codec.foreign import Memoryview, wrapped
from replaybuf.codec.marks import (
    COUNTER,
    DEFAULT_DICT,
    DEQUE,
    MEMORYVIEW,
    ORDERED_DICT,
    PATH,
    RANGE,
    Form,
    Restore,
    mark,
)

#: What a defaultdict may make of missing keys; the names are part of the format.
_FACTORIES: Final[dict[str, Callable[[], Any]]] = {
    cls.__name__: cls for cls in (bool, bytes, dict, float, int, list, set, str, tuple)
}
_PATHS: Final[dict[str, type[PurePath]]] = {
    cls.__name__: cls for cls in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)
}
#: Concrete paths can be made only on their own system: elsewhere they are restored as pure ones.
_ELSEWHERE: Final[dict[type[PurePath], type[PurePath]]] = {PosixPath: PurePosixPath, WindowsPath: PureWindowsPath}
_HERE: Final = type(Path())


def _take_defaultdict_apart(value: defaultdict[Any, Any]) -> list[Any]:
    factory: Any = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise TypeError(
            f"a defaultdict whose missing keys are made by {factory!r:.100} can't be stored: there are "
            f"{', '.join(_FACTORIES)}; or use a plain dict"
        )
    return [name, wrapped(dict(value))]


def _build_defaultdict(content: list[Any]) -> defaultdict[Any, Any]:
    name, items = content
    if type(items) is not dict:
        raise ValueError(f"a {type(items).__name__} where a dict belongs")
    return defaultdict(None if name is None else _FACTORIES[name], items)


def _path(path: PurePath) -> list[str]:
    text = str(path)
    if type(path)(text) != path:  # shares of Windows without a name
        raise TypeError(f"the path {path!r:.100} can't be stored: its text is that of another path")
    return [type(path).__name__, text]


def _build_path(content: list[Any]) -> PurePath:
    name, text = content
    if type(text) is not str:
        raise ValueError(f"a {type(text).__name__} where a path belongs")
    cls = _PATHS[name]
    return cls(text) if cls is _HERE else _ELSEWHERE.get(cls, cls)(text)


def _build_deque(content: list[Any]) -> deque[Any]:
    maxlen, items = content
    if type(items) is not list or not (maxlen is None or len(items) <= maxlen):
        raise ValueError(f"no items of a deque with maxlen {maxlen!r:.80}")
    return deque(items, maxlen)


def _take_view_apart(stand_in: Memoryview) -> list[Any]:
    view: memoryview = stand_in.value
    content = [view.format, list(view.shape or ()), view.tobytes()]
    try:
        _build_view(content)
    except (TypeError, ValueError) as error:
        raise TypeError(f"a memoryview of {view.format!r} can't be stored ({error}): use bytes or an array") from error
    return content


def _build_view(content: list[Any]) -> memoryview:
    layout, shape, raw = content
    if type(raw) is not bytes:
        raise ValueError(f"a {type(raw).__name__} where the bytes of a memoryview belong")
    view = memoryview(raw).cast(layout)
    if len(shape) != 1:
        view = memoryview(raw).cast(layout, shape)
    if math.prod(shape) * view.itemsize != len(raw):
        raise ValueError(f"a memoryview of shape {shape!r:.80} can't have {len(raw)} bytes")
    return view


#: How these are packed, by class.
FORMS: Final[dict[type, Form]] = {
    range: (mark(RANGE), lambda value: [value.start, value.stop, value.step]),
    deque: (mark(DEQUE), lambda value: [value.maxlen, wrapped(list(value))]),
    OrderedDict: (mark(ORDERED_DICT), lambda value: wrapped(dict(value))),
    Counter: (mark(COUNTER), lambda value: wrapped(dict(value))),
    defaultdict: (mark(DEFAULT_DICT), _take_defaultdict_apart),
    Memoryview: (mark(MEMORYVIEW), _take_view_apart),
    **{cls: (mark(PATH), _path) for cls in _PATHS.values()},
}

#: How they are restored: mark, type of the content, function.
RESTORES: Final[tuple[tuple[int, type, Restore], ...]] = (
    (RANGE, list, lambda numbers: range(*numbers)),
    (DEQUE, list, _build_deque),
    (ORDERED_DICT, dict, OrderedDict),
    (COUNTER, dict, Counter),
    (DEFAULT_DICT, list, _build_defaultdict),
    (PATH, list, _build_path),
    (MEMORYVIEW, list, _build_view),
)
