"""The results of a load: plain values for JSON, and a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from replaybuf import RolloutState
from replaybuf.cli.bench.load import MODEL_STEP, BenchSettings, GroupMaker
from replaybuf.cli.bench.run import Outcome
from replaybuf.cli.output import print_line, print_table, write
from replaybuf.common import units
from replaybuf.common.redact import redact_words
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.group_fields import fields_of
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.values.rollouts.staleness import date_responses
from replaybuf.view.columns import Column

Results = dict[str, Any]

#: The calls whose latencies are recorded: their names in JSON, and in the text.
CALLS = {"put": "put", "take": "take, less its wait", "acknowledge": "acknowledge"}
#: The reported quantiles, by their names in JSON and in the text.
QUANTILES = {"p50_ms": ("p50", 0.5), "p90_ms": ("p90", 0.9), "p99_ms": ("p99", 0.99), "max_ms": ("max", 1.0)}
_NAME = 11


def results_of(outcome: Outcome) -> Results:
    """Return the results of a load."""
    settings, seconds = outcome.settings, outcome.seconds
    puts, takes = outcome.reports["worker"], outcome.reports["trainer"]
    size = bytes_of_group(settings)
    latencies = puts.latencies | takes.latencies
    errors = puts.errors + takes.errors
    return {
        "database": outcome.where,
        "seconds": seconds,
        "settings": {name: value for name, value in asdict(settings).items() if name != "url"},
        "bytes_of_group": size,
        "per_second": {
            "put": len(puts.put) / seconds,
            "taken": len(takes.taken) / seconds,
            "put_bytes": len(puts.put) * size / seconds,
            "due": settings.rate * settings.workers or None,
        },
        "calls": {call: quantiles(latencies[call]) for call in CALLS if call in latencies},
        "waited": {
            "workers": _share(puts.waited, seconds * settings.workers),
            "trainers": _share(takes.waited, seconds * settings.trainers),
        },
        "ledger": ledger_of(outcome),
        "errors": [{"call": call, "error": redact_words(text), "count": n} for (call, text), n in errors.items()],
        "failed": [redact_words(cause) for cause in outcome.failed],
    }


def passed(results: Results) -> bool:
    """Return whether there were no errors, and no group was lost or doubled."""
    return not (results["errors"] or results["failed"]) and results["ledger"]["balanced"] is not False


def bytes_of_group(settings: BenchSettings) -> int:
    """Return the stored bytes of a group, without its metadata."""
    codec = Codec(RolloutType(RolloutState))
    group = GroupMaker(settings, 0).make()
    date_responses(group, fields_of(group, codec.rollout_type), MODEL_STEP, codec.rollout_type)
    return len(codec.encode(group))


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the number of latencies, their mean and their quantiles (by nearest rank) in milliseconds."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    milliseconds = {name: 1000 * ordered[min(last, int(q * len(ordered)))] for name, (_, q) in QUANTILES.items()}
    return {"count": len(ordered), "mean_ms": 1000 * sum(ordered) / len(ordered), **milliseconds}


def _share(seconds: float, time: float) -> float:
    return min(1.0, seconds / time) if time else 0.0


def ledger_of(outcome: Outcome) -> dict[str, Any]:
    """Return counts of groups, and whether those put are exactly those taken or left (`balanced`).

    `balanced` is None if that is unknown: with unreadable groups, puts in doubt or killed processes.
    """
    put, taken, left = outcome.reports["worker"].put, outcome.reports["trainer"].taken, outcome.left or []
    lost, doubled = len(set(put).difference(taken, left)), len(taken) + len(left) - len({*taken, *left})
    in_doubt = outcome.reports["worker"].in_doubt
    unknown = outcome.left is None or in_doubt or outcome.failed
    balanced = None if unknown and (lost or doubled or outcome.left is None) else not (lost or doubled)
    counts = {"put": len(put), "taken": len(taken), "left": len(left), "in_doubt": in_doubt}
    return {**counts, "lost": lost, "doubled": doubled, "balanced": balanced}


# For people


def print_results(results: Results) -> None:
    """Print the results."""
    settings = results["settings"]
    processes = [units.number_of(settings[f"{role}s"], role) for role in ("worker", "trainer") if settings[f"{role}s"]]
    group = f"groups of {settings['rollouts']} x {settings['tokens']:,} tokens, {units.size(results['bytes_of_group'])}"
    pace = f"{units.figure(settings['rate'], 2)} groups/s a worker" if settings["rate"] else "as fast as they go"
    take = f"{'leases' if settings['leases'] else 'takes'} of {settings['take']}"
    print_line(f"{' and '.join(processes)}, {results['seconds']:,.0f} s, on {results['database']}")
    print_line(f"{group}; {pace}; {take}\n")
    calls = [{"call": CALLS[name], **latencies} for name, latencies in results["calls"].items()]
    figures = {"mean_ms": "mean", **{name: label for name, (label, _) in QUANTILES.items()}}
    latency_columns = [Column(name, header, "milliseconds") for name, header in figures.items()]
    print_table(calls, [Column("call", "milliseconds", "word"), Column("count", "calls"), *latency_columns])
    write(["\n"])
    for name, text in _facts(results):
        print_line(f"{name:<{_NAME}}{text}")


def _facts(results: Results) -> Iterator[tuple[str, str]]:
    rates, waited, ledger = results["per_second"], results["waited"], results["ledger"]
    due = f" of {rates['due']:,.1f} due" if rates["due"] else ""
    size = units.size(round(rates["put_bytes"]))
    yield "groups", f"{rates['put']:,.1f}/s put{due} ({size}/s), {rates['taken']:,.1f}/s taken"
    yield (
        "waits",
        f"workers waited {waited['workers']:.1%} of their time for room, trainers {waited['trainers']:.1%} for groups",
    )
    counts = f"{ledger['put']:,} put, {ledger['taken']:,} taken, {ledger['left']:,} left"
    if ledger["balanced"] is None:
        yield "ledger", f"{counts}: not compared ({ledger['in_doubt']:,} puts in doubt, or processes were killed)"
    else:
        words = ("lost", "doubled") if ledger["balanced"] else ("LOST", "DOUBLED")
        yield "ledger", f"{counts}: {ledger['lost']:,} {words[0]}, {ledger['doubled']:,} {words[1]}"
    errors = (f"{error['count']:,} {error['call']} {error['error']:.300}" for error in results["errors"])
    yield "errors", "; ".join(errors) or "none"
    for failure in results["failed"]:
        yield "failed", failure
