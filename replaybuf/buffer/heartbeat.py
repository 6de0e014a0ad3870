"""Heartbeats: a thread that extends leases while this process lives, however busy its event loops are."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

_BEATS = 3


class Beating(Protocol):
    """A lease that lasts as long as it is extended, each time by `seconds`."""

    seconds: float

    async def beat(self) -> bool:
        """Extend the lease. Return False if it has ended."""


class Heart:
    """Extends the leases of a storage from its own thread, also while a training step blocks the loop.

    A lease that was dropped without being settled runs out. The thread ends with the last lease.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all leases. In a forked process they are the parent's, whose thread extends them while it lives."""
        self._leases: weakref.WeakKeyDictionary[Beating, float] = weakref.WeakKeyDictionary()  # when each is due
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def beat_for(self, lease: Beating) -> None:
        """Extend a lease from now on."""
        with self._changed:
            self._leases[lease] = time.monotonic() + lease.seconds / _BEATS
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="replaybuf-heartbeat", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop_for(self, lease: Beating) -> None:
        with self._changed:
            self._leases.pop(lease, None)
            self._changed.notify()

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            asyncio.run(self._beat(due))
            due.clear()  # keep no lease alive during the next wait

    def _wait(self) -> list[Beating] | None:
        """Return the leases to be extended now, or None when no leases are left."""
        with self._changed:
            while True:
                now = time.monotonic()
                beats = list(self._leases.items())  # copied at once: any lease may be dropped at any moment
                if due := [lease for lease, when in beats if when <= now]:
                    return due
                if not beats:
                    self._thread = None
                    return None
                first = min(when for _, when in beats)
                del beats
                self._changed.wait(first - now)

    async def _beat(self, due: Sequence[Beating]) -> None:
        await asyncio.gather(*map(self._extend, due))

    async def _extend(self, lease: Beating) -> None:
        if not await lease.beat():
            self.stop_for(lease)
            return
        with self._changed:
            if lease in self._leases:
                self._leases[lease] = time.monotonic() + lease.seconds / _BEATS


def heart_of(storage: object) -> Heart:
    """Return the heart that beats for the leases of a storage."""
    return _hearts.setdefault(storage, Heart())


_hearts: weakref.WeakKeyDictionary[object, Heart] = weakref.WeakKeyDictionary()


def _forked() -> None:
    for heart in _hearts.values():
        heart.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
