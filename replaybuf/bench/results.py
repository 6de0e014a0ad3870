"""Results of a load as plain values for JSON: rates, quantiles, waits, and the bottleneck if it was found."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import replaybuf
from replaybuf import RolloutState, units
from replaybuf.bench.counted import CALLS, RELATIVE_ERROR, Histogram, Said, UidSums
from replaybuf.bench.loads import MODEL_STEP, BenchSettings, GroupMaker
from replaybuf.bench.run import Child, Outcome, Second, said
from replaybuf.codec.payload import Codec
from replaybuf.redact import redact_words
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rollouts.staleness import fill_model_steps

#: Thresholds of a bottleneck, as fractions: of time waited, of processors used, of the due puts that were made.
_MUCH_WAITING, _MUCH_BUSY, _ENOUGH = 0.2, 0.9, 0.98
_FEW_SAMPLES = 20

Results = dict[str, Any]


def results_of(outcome: Outcome) -> Results:
    """Return the results of a load."""
    settings = outcome.settings
    workers, trainers = ([one for one in outcome.children if one.role == role] for role in ("worker", "trainer"))
    put = sum((child.report.put for child in workers), UidSums())
    taken = sum((child.report.taken for child in trainers), UidSums())
    size, counted = bytes_of_group(settings), max(1e-3, outcome.seconds - outcome.counts_after)
    found = {
        "replaybuf": replaybuf.__version__,
        "database": outcome.where,
        "began": units.time_of(outcome.began),
        "seconds": outcome.seconds,
        "ended_early": bool(outcome.signalled),
        "settings": {name: value for name, value in asdict(settings).items() if name != "url"},
        "bytes_of_group": size,
        "per_second": {
            "put": put.count / outcome.seconds,
            "taken": taken.count / outcome.seconds,
            "put_bytes": put.count * size / outcome.seconds,
            "due": settings.rate * settings.workers or None,
        },
        "relative_error": RELATIVE_ERROR,
        "latencies_after_seconds": outcome.counts_after,
        "calls": {call: _call(outcome.latencies.get(call), counted) for call in _calls(settings)},
        "waits": {
            "for_room": _waits(workers, outcome, settings.concurrency),
            "pauses": {
                "count": _sum(workers, "pauses"),
                "part_of_time": _part(_sum(workers, "paused"), workers, outcome, settings.concurrency),
            },
            "for_groups": _waits(trainers, outcome, 1),
        },
        "late": _sum(workers, "late"),
        "ledger": ledger_of(put, taken, outcome),
        "errors": [
            {"call": call, "error": kind, **_told(one)} for (call, kind), one in said(outcome, "errors").items()
        ],
        "warnings": [{"logger": logger, **_told(one)} for logger, one in said(outcome, "warnings").items()],
        "notes": [redact_words(note) for note in outcome.notes],
        "failed": [f"{child.name}: {redact_words(child.why)}" for child in outcome.children if child.why],
        "processes": {"workers": _processes(workers, outcome), "trainers": _processes(trainers, outcome)},
        "machine": {
            "processors": os.cpu_count(),
            "python": platform.python_version(),
            "system": platform.system(),
            "busy": outcome.busy,
            "load": outcome.load,
        },
        "database_before": outcome.before,
        "database_after": outcome.after,
        "database_meanwhile": outcome.seen,
        # The last second may have just begun, and be too short for a rate.
        "over_time": [_second(one, before) for before, one in pairwise(outcome.over_time) if one.at - before.at > 0.5],
    }
    return {**found, "limits": limits_of(found)}


def passed(results: Results) -> bool:
    """Return whether there were no errors, and no group was lost or duplicated."""
    return (
        not (results["errors"] or results["failed"] or results["notes"]) and results["ledger"]["balanced"] is not False
    )


def bytes_of_group(settings: BenchSettings) -> int:
    """Return the stored bytes of a group, without its metadata."""
    codec = Codec(RolloutType(RolloutState))
    group = GroupMaker(settings, 0).make()
    for rollout in group:
        fill_model_steps(rollout, MODEL_STEP, codec.rollout_type)
    return len(codec.encode(group))


def _calls(settings: BenchSettings) -> list[str]:
    there = {
        "put": settings.workers,
        "put_waited": settings.workers,
        "put_due": settings.workers and settings.rate,
        "take": settings.trainers,
        "acknowledge": settings.trainers and settings.leases,
    }
    return [call for call in CALLS if there[call]]


def _call(found: Histogram | None, seconds: float) -> dict[str, Any]:
    count = (found := found or Histogram()).counts.total()
    return {"count": count, "per_second": count / seconds, **found.figures()}


def _waits(children: Sequence[Child], outcome: Outcome, at_once: int) -> dict[str, Any]:
    waited = _sum(children, "waited")
    return {
        "count": _sum(children, "waits"),
        "seconds": waited,
        "part_of_time": _part(waited, children, outcome, at_once),
        "timeouts": _sum(children, "refused") + _sum(children, "starved"),
    }


def _sum(children: Sequence[Child], name: str) -> Any:
    return sum(getattr(child.report, name) for child in children)


def _told(one: Said) -> dict[str, Any]:
    return {"count": one.count, "first": redact_words(one.first)}


def _part(seconds: float, children: Sequence[Child], outcome: Outcome, at_once: int) -> float:
    """Return `seconds` as a fraction of the processes' time, with `at_once` concurrent calls each."""
    time = outcome.seconds * len(children) * at_once
    return min(1.0, seconds / time) if time else 0.0


def ledger_of(put: UidSums, taken: UidSums, outcome: Outcome) -> dict[str, Any]:
    """Return the ledger: counts of groups, and whether those put are exactly those taken or left (`balanced`).

    `balanced` is None if that is unknown: with other loads, unreadable groups, puts in doubt or killed processes.
    """
    left, in_doubt = outcome.left or UidSums(), _sum(outcome.children, "in_doubt")
    killed = sum(child.why is not None for child in outcome.children)
    balanced: bool | None = put == taken + left
    if outcome.settings.joined or outcome.left is None or (not balanced and (in_doubt or killed)):
        balanced = None
    return {
        "put": put.count,
        "taken": taken.count,
        "left": left.count,
        "lost": max(0, put.count - taken.count - left.count) if balanced is not None else None,
        "doubled": max(0, taken.count + left.count - put.count) if balanced is not None else None,
        "in_doubt": in_doubt,
        "balanced": balanced,
    }


def _processes(children: Sequence[Child], outcome: Outcome) -> dict[str, Any] | None:
    if not children:
        return None
    return {
        "count": len(children),
        "processors": _sum(children, "cpu") / outcome.seconds,
        "memory_first": statistics.median(child.first_memory for child in children),
        "memory_last": statistics.median(child.report.memory for child in children),
        "memory_most": max(child.most_memory for child in children),
    }


def _second(one: Second, before: Second) -> dict[str, Any]:
    seconds = one.at - before.at
    found: dict[str, Any] = {
        "second": round(one.at, 2),
        "put_per_second": (one.put - before.put) / seconds,
        "taken_per_second": (one.taken - before.taken) / seconds,
        "buffered": one.put - one.taken,
    }
    for call, histogram in one.latencies.items():
        figures = histogram.figures()
        found[call] = {name: figures[name] for name in ("p50_ms", "p90_ms", "p99_ms")}
    return found


# Bottlenecks


def limits_of(results: Results) -> list[str]:
    """Return sentences about the bottlenecks of the load."""
    found, waits = _of_puts(results), results["waits"]["for_groups"]
    if results["processes"]["trainers"] is not None and waits["part_of_time"] >= _MUCH_WAITING:
        found.append(f"Trainers waited for groups {waits['part_of_time']:.0%} of their time: takes could be more.")
    return [*found, *_of_sessions(results)]


def _of_puts(results: Results) -> list[str]:
    if results["processes"]["workers"] is None:
        return []
    waits, due, put = results["waits"], results["per_second"]["due"], results["per_second"]["put"]
    room = waits["for_room"]["part_of_time"] + waits["pauses"]["part_of_time"]
    if room >= _MUCH_WAITING:
        return [
            f"Workers waited for room {room:.0%} of their time: the trainers, or --capacity and --most, were the "
            "limit, not the database."
        ]
    if due and put >= _ENOUGH * due:
        return [f"The {units.figure(due, 1)} groups a second that were due were put: the limit wasn't reached."]
    behind = "" if not due else f"Of {units.figure(due, 1)} groups a second that were due, {put:,.1f} were put. "
    busy, processors = results["machine"]["busy"], results["machine"]["processors"]
    if busy is not None and busy >= _MUCH_BUSY:
        used = sum(one["processors"] for one in results["processes"].values() if one)
        return [
            f"{behind}This machine's {units.number_of(processors, 'processor')} were the limit ({busy:.0%} busy). This "
            f"load used {used:.1f}, other programs the rest, perhaps the database itself: workers on other hosts may "
            "get more out of it."
        ]
    elsewhere = "" if busy is None else f" ({busy:.0%} busy)"
    return [
        f"{behind}Workers waited for the answers to their puts, and this machine's processors weren't the limit"
        f"{elsewhere}: the database, its disk or the network was, or the number of workers."
    ]


def _of_sessions(results: Results) -> list[str]:
    seen = results["database_meanwhile"]
    waits: Mapping[str, int] = seen.get("waits", {})
    total = sum(waits.values())
    found = []
    if seen.get("samples", 0) >= _FEW_SAMPLES and total:
        most = units.some([f"{wait} {count / total:.0%}" for wait, count in list(waits.items())[:4]])
        found.append(f"Sessions that weren't idle were seen {total / seen['samples']:.1f} at a time, in: {most}.")
    most_connections = results["database_after"].get("max_connections")
    if most_connections and seen.get("most_connections", 0) >= 0.8 * most_connections:
        found.append(
            f"{seen['most_connections']} of {most_connections} connections were in use: raise max_connections, or put "
            "PgBouncer in between (docs/pgbouncer.md)."
        )
    return found
