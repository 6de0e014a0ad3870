"""Lease renewal by a thread of its own, which goes on while a training step blocks the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replaybuf.buffer.lease import Lease

#: Renewals in the time of a lease.
_BEATS = 3


class Heartbeats:
    """Renews the leases of a storage from a thread of its own, also while a training step blocks the event loop.

    A garbage-collected lease expires. The thread ends with the last lease.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Drop all leases: in a forked process they belong to the parent, whose thread renews them while it lives."""
        self._leases: weakref.WeakKeyDictionary[Lease[Any], float] = weakref.WeakKeyDictionary()  # times of renewal
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def renew(self, lease: Lease[Any]) -> None:
        """Start renewing a lease."""
        with self._changed:
            self._leases[lease] = time.monotonic() + lease.seconds / _BEATS
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="replaybuf-heartbeat", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self, lease: Lease[Any]) -> None:
        with self._changed:
            self._leases.pop(lease, None)
            self._changed.notify()

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            asyncio.run(self._beat(due))
            due.clear()  # keep no lease alive during the next wait

    def _wait(self) -> list[Lease[Any]] | None:
        """Wait until renewals are due and return their leases; None when no leases are left."""
        with self._changed:
            while True:
                now = time.monotonic()
                beats = list(self._leases.items())  # copied at once: a lease may be garbage-collected at any moment
                if due := [lease for lease, when in beats if when <= now]:
                    return due
                if not beats:
                    self._thread = None
                    return None
                first = min(when for _, when in beats)
                del beats
                self._changed.wait(first - now)

    async def _beat(self, due: Sequence[Lease[Any]]) -> None:
        await asyncio.gather(*map(self._extend, due))

    async def _extend(self, lease: Lease[Any]) -> None:
        if not await lease.beat():
            self.stop(lease)
            return
        with self._changed:
            if lease in self._leases:
                self._leases[lease] = time.monotonic() + lease.seconds / _BEATS


def heartbeats_of(storage: object) -> Heartbeats:
    """Return the heartbeats of the leases of a storage."""
    return _heartbeats_of.setdefault(storage, Heartbeats())


_heartbeats_of: weakref.WeakKeyDictionary[object, Heartbeats] = weakref.WeakKeyDictionary()


def _forked() -> None:
    for heartbeats in _heartbeats_of.values():
        heartbeats.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
