"""What replaybuf needs of Ray, in this process: for tests of who fetches what, and when."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any


class ObjectRef:
    """A reference to an object of the fake."""

    def __init__(self, number: int) -> None:
        self.number = number


class GetTimeoutError(Exception):
    """The object isn't there yet."""


class OwnerDiedError(Exception):
    """The object is gone."""


class FakeRay(ModuleType):
    """Objects by reference. An exception stands for what can't be had; `gets` are the sizes of the calls."""

    ObjectRef = ObjectRef

    def __init__(self) -> None:
        super().__init__("ray")
        self.objects: list[Any] = []
        self.gets: list[int] = []
        self.threads: set[int] = set()
        self.running = True
        self.ready = threading.Event()
        self.ready.set()
        self.exceptions = ModuleType("ray.exceptions")
        self.exceptions.GetTimeoutError = GetTimeoutError  # type: ignore[attr-defined]

    def is_initialized(self) -> bool:
        return self.running

    def put(self, value: Any) -> ObjectRef:
        ref = ObjectRef(len(self.objects))
        self.objects.append(value)
        return ref

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, ObjectRef):
            return self._one(refs)
        self.gets.append(len(refs))
        self.threads.add(threading.get_ident())
        if not self.ready.wait(timeout):
            raise GetTimeoutError
        return [self._one(ref) for ref in refs]

    def _one(self, ref: ObjectRef) -> Any:
        value = self.objects[ref.number]
        if isinstance(value, Exception):
            raise value
        return value
