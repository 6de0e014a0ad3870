"""What was measured of the peers, as tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.peers.adapter import SIZES
from benchmarks.table import number, percentile

#: A peer's turns of one row.
Turns = Sequence[Mapping[str, Any]]


def tables(results: Mapping[str, Any], rows: Sequence[tuple[str, str, str]]) -> str:
    """Return a table for each size and kind of groups, one of all else, and the reasons of what is missing."""
    parts = [_groups(results, size, kind) for turn, size, kind in rows if turn == "groups"]
    parts += [_others(results), "\n".join(_missing(results))]
    return "\n\n".join(part for part in parts if part)


def rate(turns: Turns, call: str) -> list[float]:
    """Return the groups per second of each turn that puts ("put") or takes ("take")."""
    return [turn["count"] / turn[call]["seconds"] for turn in turns]


def _groups(results: Mapping[str, Any], size: str, kind: str) -> str:
    headings = [
        f"groups of {SIZES[size]}, {kind}",
        *("put /s", "take /s", "CPU of a put, us", "its server", "CPU of a take, us", "its server"),
    ]
    lines = []
    for result in results.values():
        turns = result.turns.get(f"groups {size} {kind}")
        if turns:
            cpu = [_range(_cpu(turns, turn, cost)) for turn in ("put", "take") for cost in ("cpu", "server_cpu")]
            lines.append([result.title, _range(rate(turns, "put")), _range(rate(turns, "take")), *cpu])
    return _table(headings, lines)


def _cpu(turns: Turns, call: str, cost: str) -> list[float]:
    return [turn[call][cost] / turn["count"] * 1e6 for turn in turns]


def _others(results: Mapping[str, Any]) -> str:
    headings = [
        "",
        "one put of 1 KB alone, p50 / p99 ms",
        "waking another process, p50 / p99 ms",
        "a process puts, another takes 100 KB, /s",
        "left after kill -9 of it and of what it had started (not of PostgreSQL)",
        "by its settings left after a power cut",
        "to know",
    ]
    lines = []
    for result in results.values():
        cells = [
            _cell(result, "lone 1K arrays", _latency),
            _cell(result, "wake 1K arrays", _latency),
            _cell(result, "pair 100K arrays", lambda turns: _range([row["count"] / row["seconds"] for row in turns])),
            _cell(result, "kill 1K arrays", lambda turns: f"{turns[0]['left']} of {turns[0]['of']}"),
        ]
        note = "; ".join(part for part in (result.version, result.note) if part)
        if "all" not in result.missing:
            lines.append([result.title, *cells, result.power, note])
    return _table(headings, lines)


def _cell(result: Any, row: str, show: Callable[[Turns], str]) -> str:
    return show(result.turns[row]) if row in result.turns else "-"


def _latency(turns: Turns) -> str:
    seconds = [latency for turn in turns for latency in turn["latencies"]]
    return f"{number(percentile(seconds, 50) * 1000)} / {number(percentile(seconds, 99) * 1000)}"


def _missing(results: Mapping[str, Any]) -> Iterator[str]:
    for name, result in results.items():
        for row, reason in result.missing.items():
            yield f"- {name}, {'not measured' if row == 'all' else row}: {reason}"


def _range(values: Sequence[float]) -> str:
    return f"{number(statistics.median(values))} ({number(min(values))}..{number(max(values))})"


def _table(headings: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, ["---"] * len(headings), *lines])
