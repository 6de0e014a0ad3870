"""Histories: what processes called, when each call began and ended, and what came of it; one form for all suites.

A process appends a line when a call begins, and one when it ends. A call of which only the beginning is there was under
way when its process died. Times are of the clock that all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from replaybuf import ReplayBufError

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


class Recorder:
    """Appends the calls of a process to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._count = 0

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
        except (ReplayBufError, asyncio.CancelledError):
            self._write(number, end=time.monotonic_ns())
            raise
        groups = {"groups": list(groups_of(result))} if "groups" not in about else {}
        self._write(number, end=time.monotonic_ns(), known=True, **groups)
        return result

    def _write(self, number: int, **values: Any) -> None:
        self._file.write(json.dumps([number, values]) + "\n")


def calls_in(paths: Iterable[Path]) -> list[Call]:
    """Return the calls of several processes."""
    calls: list[Call] = []
    for path in paths:
        own: dict[int, dict[str, Any]] = {}
        for line in path.read_text().splitlines():
            number, values = json.loads(line)
            own.setdefault(number, {}).update(values)
        last = max((max(values["begin"], values.get("end", 0)) for values in own.values()), default=0)
        for values in own.values():
            died = "end" not in values
            if not values.get("known"):
                values["end"] = values.get("end", last) + UNDONE
            calls.append(Call(**values, died=died))
    return calls
