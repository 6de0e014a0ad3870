"""Ray ObjectRefs in payloads: stored as the values of their objects, which outlive the cluster.

Packing looks the values up and never blocks: if one is missing, the codec reports it (`UnfetchedError`), and a caller
that may block fetches all of them in one call and encodes again. Ray is never imported here: a value can't be an
ObjectRef unless Ray was imported.

After a put, `Codec.release` replaces ObjectRefs in the caller's rollouts by None. Ray deletes an object when no process
holds an ObjectRef to it; those held elsewhere stay valid.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from replaybuf.codec.extension_types import OBJECT_REF, Decoder, Encoder, checked, type_tag
from replaybuf.errors import DecodeError, RolloutError

RestoreRefs = Literal["ref", "value", "stored"]
#: Fetched values by ObjectRef, or a `_Problem` for an object that can't be fetched.
Fetched = dict[Any, Any]

_WHY: Final = {
    "GetTimeoutError": "it was not there after {timeout:g} s (object_ref_timeout)",
    "OwnerDiedError": "its owner, the process that made it, has died",
    "ObjectFreedError": "it was freed",
    "ObjectLostError": "all copies of it are lost",
    "ReferenceCountingAssertionError": "it was deleted",
}


class UnfetchedError(RolloutError):
    """The rollouts hold ObjectRefs whose values have to be fetched first: `refs`."""

    def __init__(self, refs: Sequence[Any] = ()) -> None:
        super().__init__()
        self.refs = tuple(refs)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Replaces the value of an object that can't be fetched."""

    text: str


@dataclass(slots=True)
class _AtHand:
    """The values for one encoding, and the ObjectRefs without a value that it met."""

    values: Fetched
    missing: dict[Any, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _StoredObject:
    """An object as stored in its payload, for copies of payloads: it isn't put into Ray."""

    value: Any


_at_hand: ContextVar[_AtHand | None] = ContextVar("replaybuf_object_refs", default=None)


class ObjectRefs:
    """Encodes ObjectRefs. They are restored as new ones (`ref`), or as the values of their objects (`value`).

    A new object belongs to the reading process. `timeout` is that of fetching the objects of a group, in seconds.
    """

    def __init__(self, restore_as: RestoreRefs, timeout: float) -> None:
        restore: Decoder = {"ref": _put, "value": lambda value: value, "stored": _StoredObject}[restore_as]
        self._timeout = timeout
        self.decoders: Mapping[int, Decoder] = {OBJECT_REF: restore}

    def encoder(self, kind: type) -> Encoder | None:
        if kind is _StoredObject:
            return type_tag(OBJECT_REF), lambda stored: checked(stored.value)
        ray = _ray()
        return (type_tag(OBJECT_REF), _value_of) if ray is not None and issubclass(kind, ray.ObjectRef) else None

    def parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the fetched value of an ObjectRef."""
        at_hand = _at_hand.get()
        if at_hand is None or not is_ref(value):
            return
        if value in at_hand.values and not isinstance(at_hand.values[value], _Problem):
            yield " (the object of an ObjectRef)", at_hand.values[value]

    def fetch(self, refs: Sequence[Any]) -> Fetched:
        """Return the values of these ObjectRefs, by one call of Ray. Blocks for up to the timeout.

        An object that can't be fetched has a problem as its value, which encoding reports with its place.
        """
        ray = _ray()
        if ray is None or not ray.is_initialized():  # ray.get would start a cluster of its own
            return dict.fromkeys(refs, _Problem("Ray isn't running in this process any more"))
        try:
            return dict(zip(refs, ray.get(list(refs), timeout=self._timeout), strict=True))
        except Exception as error:  # of Ray, or of the task that makes an object
            return dict.fromkeys(refs) | self._problems(ray, refs, error)

    def _problems(self, ray: Any, refs: Sequence[Any], error: Exception) -> Fetched:
        """Return the problem of each object that can't be fetched, after the timeout for all of them."""
        late = isinstance(error, ray.exceptions.GetTimeoutError)
        problems: Fetched = {}
        for ref in refs:
            try:
                ray.get(ref, timeout=0)
            except ray.exceptions.GetTimeoutError as again:
                if late:
                    problems[ref] = self._problem(again)
            except Exception as own:
                problems[ref] = self._problem(own)
        return problems or dict.fromkeys(refs, self._problem(error))

    def _problem(self, error: Exception) -> _Problem:
        kind = type(error).__name__
        known = next((_WHY[base.__name__] for base in type(error).__mro__ if base.__name__ in _WHY), None)
        if known is not None:
            return _Problem(f"{known.format(timeout=self._timeout)} ({kind})")
        cause = getattr(error, "cause", None)  # the task's error, without the worker's traceback
        if isinstance(cause, Exception):
            return _Problem(f"the task that was to make it raised {type(cause).__name__}: {str(cause)[:300]}")
        return _Problem(f"{kind}: {str(error).strip().partition(chr(10))[0][:300]}")


@contextlib.contextmanager
def at_hand(fetched: Fetched) -> Iterator[Mapping[Any, None]]:
    """Provide these values to encodings within; yields the ObjectRefs without a value, as encodings meet them."""
    values = _AtHand(fetched)
    token = _at_hand.set(values)
    try:
        yield values.missing
    finally:
        _at_hand.reset(token)


def is_ref(value: Any) -> bool:
    """Return whether this is an ObjectRef."""
    ray = _ray()
    return ray is not None and isinstance(value, ray.ObjectRef)


def _value_of(ref: Any) -> Any:
    values = _at_hand.get()
    if values is None:
        raise UnfetchedError
    if ref not in values.values:
        values.missing[ref] = None
        return None
    value = values.values[ref]
    if isinstance(value, _Problem):
        raise TypeError(f"the object of {ref!r:.100} can't be fetched: {value.text}")
    return checked(value)


def _put(value: Any) -> Any:
    ray = _ray()
    if ray is None or not ray.is_initialized():  # ray.put would start a cluster of its own
        raise DecodeError(
            "it holds a Ray ObjectRef, and Ray isn't running in this process: call ray.init() before, or read its "
            "objects as values (object_refs='value')"
        )
    return ray.put(value)


def _ray() -> Any:
    """Return Ray if it has been imported completely."""
    ray = sys.modules.get("ray")
    return ray if hasattr(ray, "ObjectRef") and hasattr(ray, "is_initialized") else None
