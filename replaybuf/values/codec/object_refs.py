"""Ray ObjectRefs in payloads: stored as the values of their objects, which outlive the cluster.

Packing looks the values up and never blocks: if one is missing, the codec reports it (`UnfetchedError`), and a caller
that may block fetches all of them in one call and encodes again. Ray is never imported here: a value can't be an
ObjectRef unless Ray was imported.

After a put, `Codec.release` replaces ObjectRefs in the caller's rollouts by None. Ray deletes an object when no process
holds an ObjectRef to it; those held elsewhere stay valid.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from replaybuf.errors import DecodeError, RolloutError
from replaybuf.values.codec.value_types import OBJECT_REF, Decoder, Encoder, type_tag

RestoreRefs = Literal["ref", "value"]
#: Fetched values by ObjectRef, or a `_Problem` for an object that can't be fetched.
Fetched = dict[Any, Any]


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
class RefValues:
    """The values of ObjectRefs for one encoding, and the ObjectRefs without a value that it met."""

    values: Fetched
    missing: dict[Any, None] = field(default_factory=dict)

    def of(self, ref: Any) -> Any:
        """Return the value of an ObjectRef, None if it is missing. TypeError if its object can't be fetched."""
        if ref not in self.values:
            self.missing[ref] = None
            return None
        value = self.values[ref]
        if isinstance(value, _Problem):
            raise TypeError(f"the object of {ref!r:.100} can't be fetched: {value.text}")
        return value

    def parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the fetched value of an ObjectRef."""
        if is_ref(value) and not isinstance(found := self.values.get(value), _Problem):
            yield " (the object of an ObjectRef)", found


class ObjectRefs:
    """Encodes ObjectRefs. They are restored as new ones (`ref`), or as the values of their objects (`value`).

    A new object belongs to the reading process. `timeout` is that of fetching the objects of a group, in seconds.
    """

    def __init__(self, restore_as: RestoreRefs, timeout: float) -> None:
        self._timeout = timeout
        self.decoders: Mapping[int, Decoder] = {OBJECT_REF: _put if restore_as == "ref" else lambda value: value}

    def encoder(self, kind: type) -> Encoder | None:
        ray = _ray()
        # Packing replaces the ObjectRef by its value (`RefValues`).
        return (type_tag(OBJECT_REF), lambda value: value) if ray and issubclass(kind, ray.ObjectRef) else None

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
            except Exception as own:
                if late or not isinstance(own, ray.exceptions.GetTimeoutError):
                    problems[ref] = self._problem(own)
        return problems or dict.fromkeys(refs, self._problem(error))

    def _problem(self, error: Exception) -> _Problem:
        if type(error).__name__ == "GetTimeoutError":
            return _Problem(f"it was not there after {self._timeout:g} s (object_ref_timeout)")
        cause = getattr(error, "cause", None)  # the task's error, without the worker's traceback
        shown = cause if isinstance(cause, Exception) else error
        return _Problem(f"{type(shown).__name__}: {str(shown).strip().partition(chr(10))[0][:300]}")


def is_ref(value: Any) -> bool:
    """Return whether this is an ObjectRef."""
    ray = _ray()
    return ray is not None and isinstance(value, ray.ObjectRef)


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
