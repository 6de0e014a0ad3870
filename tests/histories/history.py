"""Histories of calls, and whether an order of them explains what they returned."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from replaybuf import LeaseLostError, ReplayBufError
from tests.faults.processes import entries

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
    undone until its end. `died`: its process was killed meanwhile, or before what a failed call has done was undone.
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

    def write(self, event: str, *values: object) -> None:
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
        **details: Any,
    ) -> T:
        """Await a call, and record it with the groups of its result, or with those given."""
        self._count += 1
        number = self._count
        self._write(number, kind=kind, begin=time.monotonic_ns(), **details)
        try:
            result = await call
        except LeaseLostError:  # nothing was done
            self._write(number, kind="late", end=time.monotonic_ns())
            raise
        except (ReplayBufError, asyncio.CancelledError):
            self._write(number, end=time.monotonic_ns())
            raise
        groups = details.get("groups") or list(groups_of(result))
        self._write(number, end=time.monotonic_ns(), known=True, groups=groups)
        self.done[kind] += len(groups)
        return result

    def _write(self, number: int, **values: Any) -> None:
        self._log.write("call", json.dumps([number, values]))


def calls_in(ledgers: Iterable[Path]) -> list[Call]:
    """Return the calls of several processes."""
    calls: list[Call] = []
    for ledger in ledgers:
        values_of: dict[int, dict[str, Any]] = {}
        for line in entries(ledger, "call"):
            number, values = json.loads(line)
            values_of.setdefault(number, {}).update(values)
        last = max((max(values["begin"], values.get("end", 0)) for values in values_of.values()), default=0)
        killed = any("end" not in values for values in values_of.values())
        last_return = max((values["begin"] for values in values_of.values() if values.get("known")), default=0)
        for values in values_of.values():
            # Calls wait until what failed ones before them have done is undone: whoever is killed may not get there.
            died = killed and not values.get("known") and values.get("end", FOR_EVER) > last_return
            if not values.get("known"):
                values["end"] = values.get("end", last) + UNDONE
            calls.append(Call(**values, died=died))
    return calls


def numbers_of_calls(calls: Iterable[Call], *kinds: str, known: bool = True) -> list[int]:
    """Return the groups of calls of these kinds; with `known` of those that returned."""
    return [number for call in calls if call.kind in kinds and (call.known or not known) for number in call.groups]


def violations(calls: Sequence[Call], *, fifo: bool = True, crashes: Sequence[int] = ()) -> list[str]:
    """Return what no order of the calls explains. The last calls took what was left (`fifo`: in order of insertion).

    At the moments of `crashes` the server had none of the transactions any more that calls had begun.
    """
    calls = sorted(calls, key=lambda call: call.begin)
    restores = [call for call in calls if call.kind == "restore"]
    problems = [*_from_nowhere(calls), *_not_cuts(calls, restores)]
    for epoch in _epochs(calls, restores):
        problems += [*_twice(epoch), *_held_twice(epoch), *_after_acknowledgement(epoch)]
    last = _Whole.of(epoch, crashes)
    return [*problems, *last.lost(), *last.too_few(), *(last.out_of_order() if fifo else ())]


def amiss(calls: Sequence[Call], prompts: int, times: int) -> tuple[list[int], list[int]]:
    """Return the prompts of 0, 1, ... that were trained less often than asked, and those more often."""
    counts = Counter(number for call in _of(calls, "acknowledge") for number in call.groups)
    perhaps = Counter(number for call in calls if call.died and call.kind == "acknowledge" for number in call.groups)
    skipped = [number for number in range(prompts) if counts[number] + perhaps[number] < times]
    return skipped, [number for number, count in counts.items() if count > times * (number < prompts)]


def _of(calls: Sequence[Call], *kinds: str, known: bool = True) -> list[Call]:
    return [call for call in calls if call.kind in kinds and (call.known or not known)]


def _epochs(calls: Sequence[Call], restores: Sequence[Call]) -> Iterator[list[Call]]:
    """Yield the calls before, between and after restores, without those beside one."""
    bounds = [0, *(time for call in restores for time in (call.begin, call.end)), FOR_EVER + 1]
    for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
        yield [call for call in calls if begin <= call.begin and call.end < end]


def _from_nowhere(calls: Sequence[Call]) -> Iterator[str]:
    puts = {number: call for call in _of(calls, "put", known=False) for number in call.groups}
    for call in _of(calls, "take", "lease"):
        for number in call.groups:
            if number not in puts or call.before(puts[number]):
                yield f"group {number} was got before it was put"


def _twice(calls: Sequence[Call]) -> Iterator[str]:
    for kind in ("take", "acknowledge"):
        earlier: set[int] = set()
        for call in _of(calls, kind):
            yield from (f"group {number}: {kind} twice" for number in call.groups if number in earlier)
            earlier.update(call.groups)


def _held_twice(calls: Sequence[Call]) -> Iterator[str]:
    """Yield groups that two held: a lease ends after its time, by its acknowledgement, or when it is given back."""
    ends: dict[int, list[Call]] = {}
    for call in _of(calls, "acknowledge", "give back", known=False):
        for number in call.groups:
            ends.setdefault(number, []).append(call)
    leases: dict[int, Call] = {}
    for lease in sorted(_of(calls, "lease"), key=lambda call: call.end):
        for number in lease.groups:
            other = leases.get(number)
            if other is not None and lease.end < other.begin + other.seconds * 1e9:
                released = any(other.end < call.end and call.begin < lease.end for call in ends.get(number, ()))
                if not released:
                    yield f"group {number} was leased while another lease held it"
            leases[number] = lease


def _after_acknowledgement(calls: Sequence[Call]) -> Iterator[str]:
    acknowledged: dict[int, Call] = {}
    for call in _of(calls, "acknowledge"):
        acknowledged.update(dict.fromkeys(call.groups, call))
    for lease in _of(calls, "lease"):
        for number in lease.groups:
            if number in acknowledged and acknowledged[number].before(lease):
                yield f"group {number} was leased after it was acknowledged"


def _not_cuts(calls: Sequence[Call], restores: Sequence[Call]) -> Iterator[str]:
    """Yield groups that are there after the last restore, or aren't, and mustn't or must by its checkpoint."""
    if not restores or not restores[-1].known:
        return
    last, earlier_restores = restores[-1], restores[:-1]
    cuts = [call for call in _of(calls, "checkpoint") if call.step == last.step and call.before(last)]
    if not cuts or any(not other.before(cuts[-1]) for other in earlier_restores):
        return  # of a checkpoint that was made before another restore nothing simple can be said
    cut = cuts[-1]
    calls = [call for call in calls if all(other.before(call) for other in earlier_restores)]
    receipts = [(call, number) for call in _of(calls, "take", "lease", "acknowledge") for number in call.groups]
    later = {number for call, number in receipts if last.before(call)}
    beside = {number for call, number in receipts if not call.before(last)}
    removing = [call for call in _of(calls, "take", "acknowledge", known=False) if call.begin < cut.end]
    removed = {number for call in removing for number in call.groups}
    doubtful = any(not call.known for call in removing)
    for put_call in _of(calls, "put"):
        for number in put_call.groups:
            if put_call.before(cut) and number not in removed | beside and not doubtful:
                yield f"group {number} was put before the checkpoint, and isn't there after the restore"
            if cut.before(put_call) and put_call.before(last) and number in later:
                yield f"group {number} was put after the checkpoint, and is there after the restore"


@dataclass(slots=True)
class _Whole:
    """A history since its last restore: the calls that put and took each group; takes of which nothing is known, and
    draws that were begun again after a crash."""

    puts: dict[int, Call]
    takes: dict[int, Call]
    unknown: list[Call]
    short: list[Call]

    @classmethod
    def of(cls, calls: Sequence[Call], crashes: Sequence[int]) -> _Whole:
        draws = _of(calls, "take", "lease")
        return cls(
            {number: call for call in _of(calls, "put") for number in call.groups},
            {number: call for call in _of(calls, "take", "acknowledge", known=False) for number in call.groups},
            [call for call in _of(calls, "take", known=False) if not call.known]
            + [call for call in draws if any(call.begin < moment < call.end for moment in crashes)],
            [call for call in _of(calls, "take") if len(call.groups) < call.asked],
        )

    def lost(self) -> Iterator[str]:
        """Yield the groups that nobody got; a take that was under way when its process died may have got some."""
        room = sum(call.asked for call in self.unknown if call.died)
        missing = [number for number in self.puts if number not in self.takes]
        if len(missing) > room:
            yield f"nobody got the groups {missing[:10]}: {len(missing)}, and those who died can have got {room}"

    def too_few(self) -> Iterator[str]:
        """Yield takes that got fewer than they asked for while others were there."""
        for call in self.short:
            for number, put_call in self.puts.items():
                receipt = self.takes.get(number)
                is_buffered = put_call.before(call) and (receipt is None or call.before(receipt))
                if is_buffered and receipt is not None and receipt.kind == "take" and not self._hidden(put_call, call):
                    yield f"group {number} was there, and a take got {len(call.groups)} of {call.asked}"

    def out_of_order(self) -> Iterator[str]:
        """Yield groups that were taken after later ones, though they were there."""
        numbers = [number for number in self.puts if number in self.takes and self.takes[number].kind == "take"]
        first = None  # the take that ended first, of groups that were put later
        for number in sorted(numbers, key=lambda number: -self.puts[number].begin):
            put, take = self.puts[number], self.takes[number]
            for later, end in [first] if first is not None else []:
                if put.before(self.puts[later]) and end < take.begin and not self._hidden(put, self.takes[later]):
                    yield f"group {number} was put before {later}, and taken after it"
            if first is None or take.end < first[1]:
                first = number, take.end

    def _hidden(self, put_call: Call, call: Call) -> bool:
        """Return whether a draw that failed may have held the group at the time of a call, and given it back later."""
        return any(put_call.begin < unknown_call.end and unknown_call.begin < call.end for unknown_call in self.unknown)
