"""Histories: what processes called, when each call began and ended, and what came of it; one form for all suites.

A process writes a line into its ledger when a call begins, and one when it ends. A call of which only the beginning is
there was under way when its process died. Times are of the clock that all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from replaybuf import LeaseLostError, ReplayBufError
from tests.faults.ledger import entries

T = TypeVar("T")
FOR_EVER = 1 << 62
#: What a call that failed has done is undone this many nanoseconds after its end, or after its process's last word.
UNDONE = 10**9


@dataclass(slots=True)
class Call:
    """A call of a process.

    `kind` is put, take, lease, acknowledge, checkpoint or restore; `groups` are the numbers of the groups that it put,
    got or acknowledged, `asked` how many a take asked for, `seconds` how long a lease lasts, `step` that of a
    checkpoint. With `known` it returned; of any other it isn't known whether it has had its effect, or whether that was
    undone until its end. `died`: its process was killed meanwhile.
    """

    kind: str
    begin: int
    end: int = FOR_EVER
    known: bool = False
    groups: list[int] = field(default_factory=list)
    asked: int = 0
    seconds: float = 0.0
    step: int = 0
    died: bool = False

    def before(self, other: Call) -> bool:
        """Return whether this call had ended before another one began."""
        return self.end < other.begin


class Log(Protocol):
    """A ledger, or what else keeps lines."""

    def write(self, what: str, *about: object) -> None:
        """Write a line."""


class Recorder:
    """Writes the calls of a process into its ledger."""

    def __init__(self, log: Log) -> None:
        self._log, self._count = log, 0
        #: How many groups calls of a kind have had that returned.
        self.done: Counter[str] = Counter()

    async def call(
        self,
        kind: str,
        call: Awaitable[T],
        groups_of: Callable[[T], Iterable[int]] = lambda _: (),
        **about: Any,
    ) -> T:
        """Await a call, and record it with the groups of its result, or with those given."""
        self._count += 1
        number = self._count
        self._write(number, kind=kind, begin=time.monotonic_ns(), **about)
        try:
            result = await call
        except LeaseLostError:  # nothing was done
            self._write(number, kind="late", end=time.monotonic_ns())
            raise
        except (ReplayBufError, asyncio.CancelledError):
            self._write(number, end=time.monotonic_ns())
            raise
        groups = about.get("groups") or list(groups_of(result))
        self._write(number, end=time.monotonic_ns(), known=True, groups=groups)
        self.done[kind] += len(groups)
        return result

    def _write(self, number: int, **values: Any) -> None:
        self._log.write("call", json.dumps([number, values]))


def calls_in(ledgers: Iterable[Path]) -> list[Call]:
    """Return the calls of several processes."""
    calls: list[Call] = []
    for ledger in ledgers:
        own: dict[int, dict[str, Any]] = {}
        for line in entries(ledger, "call"):
            number, values = json.loads(line)
            own.setdefault(number, {}).update(values)
        last = max((max(values["begin"], values.get("end", 0)) for values in own.values()), default=0)
        for values in own.values():
            died = "end" not in values
            if not values.get("known"):
                values["end"] = values.get("end", last) + UNDONE
            calls.append(Call(**values, died=died))
    return calls


def numbers_of_calls(calls: Iterable[Call], *kinds: str, known: bool = True) -> list[int]:
    """Return the groups of calls of these kinds; with `known` of those that returned."""
    return [number for call in calls if call.kind in kinds and (call.known or not known) for number in call.groups]
