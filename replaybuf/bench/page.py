"""The results of a load for people: a text that fits 100 columns, and a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replaybuf import units
from replaybuf.bench.counted import CALLS
from replaybuf.bench.results import Results
from replaybuf.checks import needed

_WIDTH, _NAME = 100, 11
_QUANTILES = {"mean": "mean_ms", "p50": "p50_ms", "p90": "p90_ms", "p99": "p99_ms", "p99.9": "p999_ms", "max": "max_ms"}


def text_of(results: Results) -> str:
    """Return the page of results."""
    lines = [*_title(results), "", *_calls(results), ""]
    for name, text in _facts(results):
        lines += textwrap.wrap(f"{name:<{_NAME}}{text}", _WIDTH, subsequent_indent=" " * _NAME, break_long_words=True)
    return "\n".join(lines) + "\n"


def _title(results: Results) -> list[str]:
    settings, size = results["settings"], units.size(results["bytes_of_group"])
    who = [units.number_of(settings[f"{role}s"], role) for role in ("worker", "trainer") if settings[f"{role}s"]]
    early = ", ended early" if results["ended_early"] else ""
    before = results["database_before"]
    kind = f"{'PostgreSQL' if before['kind'] == 'postgresql' else 'SQLite'} {before['version']}"
    title = (
        f"{' and '.join(who)}, {results['seconds']:,.0f} s{early}, on {results['database']} ({kind}), "
        f"from {units.number_of(results['machine']['processors'], 'processor')}"
    )
    kind = "lists" if settings["lists"] else "arrays"
    group = f"groups of {settings['rollouts']} x {settings['tokens']:,} tokens as {kind}, {size}"
    pace = f"{units.figure(settings['rate'], 2)} groups/s a worker" if settings["rate"] else "as fast as they go"
    if settings["concurrency"] > 1:
        pace += f", {settings['concurrency']} at once"
    held_back = [
        f"{name} {settings[of]:,} groups"
        for name, of in (("room for", "capacity"), ("pauses at", "most"))
        if settings[of]
    ]
    take = f"{'leases' if settings['leases'] else 'takes'} of {settings['take']}"
    return [
        *textwrap.wrap(title, _WIDTH),
        *textwrap.wrap(f"{group}; {pace}; {'; '.join([take, *held_back])}", _WIDTH),
    ]


def _calls(results: Results) -> Iterator[str]:
    yield f"{'milliseconds':<26}{'calls':>10}{'/s':>9}" + "".join(f"{name:>9}" for name in _QUANTILES)
    for call, found in results["calls"].items():
        if found["count"] or call != "put_waited":
            values = "".join(f"{_short(found[name]):>9}" for name in _QUANTILES.values())
            yield f"{CALLS[call]:<26}{found['count']:>10,}{found['per_second']:>9,.1f}{values}"


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _facts(results: Results) -> Iterator[tuple[str, str]]:
    rates, waits = results["per_second"], results["waits"]
    due = f" of {rates['due']:,.1f} due" if rates["due"] else ""
    yield (
        "groups",
        f"{rates['put']:,.1f}/s put{due} ({units.size(round(rates['put_bytes']))}/s), {rates['taken']:,.1f}/s taken",
    )
    waited = [
        _waits(waits["pauses"], "workers", "pauses"),
        _waits(waits["for_room"], "workers", "room"),
        _waits(waits["for_groups"], "trainers", "groups"),
    ]
    yield "waits", "; ".join(filter(None, waited)) or "none"
    yield "ledger", _ledger(results["ledger"])
    yield "errors", _said(results["errors"], "error") or "none"
    if results["warnings"]:
        yield "log", _said(results["warnings"], "logger")
    for failed in (*results["failed"], *results["notes"]):
        yield "failed", failed
    for role, found in results["processes"].items():
        if found:
            yield role, _processes(found)
    machine = results["machine"]
    if machine["busy"] is not None:
        yield "machine", f"{machine['busy']:.0%} of {machine['processors']} processors busy, load {machine['load']:.1f}"
    for name, texts in (("database", _database(results)), ("limit", results["limits"])):
        yield from (("" if place else name, text) for place, text in enumerate(texts))


def _waits(found: Mapping[str, Any], who: str, what: str) -> str:
    in_vain = found.get("timeouts", 0)
    if not found["count"] and not in_vain:
        return ""
    timeouts = f", {in_vain:,} in vain" if in_vain else ""
    return f"{who} {found['part_of_time']:.1%} of their time for {what} ({found['count']:,} times{timeouts})"


def _ledger(found: Mapping[str, Any]) -> str:
    counts = f"{found['put']:,} put, {found['taken']:,} taken, {found['left']:,} left"
    if found["balanced"] is None:
        doubt = f"{found['in_doubt']:,} puts in doubt" if found["in_doubt"] else "others were at it, or were killed"
        return f"{counts}: not compared ({doubt})"
    if found["balanced"]:
        return f"{counts}: 0 lost, 0 doubled"
    if found["lost"] or found["doubled"]:
        return f"{counts}: {found['lost']:,} LOST, {found['doubled']:,} DOUBLED"
    return f"{counts}: as many were LOST as were DOUBLED"


def _said(found: Sequence[Mapping[str, Any]], name: str) -> str:
    return "; ".join(
        f"{one['count']:,} {one.get('call', '')} {one[name]}".replace("  ", " ") + f" ({one['first']:.300})"
        for one in found
    )


def _processes(found: Mapping[str, Any]) -> str:
    first, last, most = (units.size(round(found[f"memory_{when}"])) for when in ("first", "last", "most"))
    return (
        f"{found['processors']:.2f} processors; {first} resident each at first, {last} at the end, {most} at the most"
    )


def _database(results: Results) -> Iterator[str]:
    before, after, seen = (results[f"database_{when}"] for when in ("before", "after", "meanwhile"))
    if not after:
        return  # the database can't be read any more, as a note says
    sizes = f"{units.size(before['bytes'])} before, {units.size(after['bytes'])} after"
    if after["kind"] == "sqlite":
        yield (
            f"{sizes} ({units.size(after['free_bytes'])} of it free); log {units.size(after['log_bytes'])}, at most "
            f"{units.size(seen['longest_log_bytes'])}"
        )
        return
    seconds = results["seconds"]
    grown = {name: after[name] - before[name] for name in ("wal_position", "commits", "rollbacks", "deadlocks")}
    wal = f"{units.size(grown['wal_position'])} of WAL ({units.size(round(grown['wal_position'] / seconds))}/s)"
    yield (
        f"{sizes}; {wal}; {grown['commits'] / seconds:,.0f} commits/s, {grown['rollbacks']:,} rollbacks, "
        f"{grown['deadlocks']:,} deadlocks; at most {seen.get('most_connections', 0)} of {after['max_connections']} "
        "connections"
    )
    tables = [
        f"{one['name']} {units.size(one['bytes'])} ({one['dead']:,} dead rows, {one['live']:,} live)"
        for one in after["tables"][:3]
    ]
    if tables:
        yield "largest tables: " + ", ".join(tables)
    yield (f"shared_buffers {after['shared_buffers']}, max_wal_size {after['max_wal_size']}, fsync {after['fsync']}")


# The picture

_PLOT, _LEFT, _TALL, _EDGE = 660, 52, 130, 16
_COLOURS = ("#2f6f9f", "#b8620e", "#3f7d3a")
_STYLE = " ".join(
    (
        "svg { overflow: visible } text { font: 11px system-ui, sans-serif; fill: #5b636b }",
        ".title { font-weight: 600; font-size: 13px; fill: #1d2125 }",
        ".left text { text-anchor: end; dominant-baseline: central }",
        ".bottom .middle { text-anchor: middle } .bottom .last { text-anchor: end }",
        ".grid { stroke: #dddfdc; vector-effect: non-scaling-stroke }",
        ".line { fill: none; stroke-width: 1.75; vector-effect: non-scaling-stroke }",
        *(f".line.s{n} {{ stroke: {one} }} .key.s{n} {{ fill: {one} }}" for n, one in enumerate(_COLOURS)),
    )
)


def check_picture() -> None:
    """Raise MissingDriverError where a picture can't be drawn; called before the load."""
    needed("markupsafe", "the picture needs the package markupsafe: pip install markupsafe")


def picture_of(results: Results) -> str:
    """Return an SVG: groups a second, groups in the buffer, and quantiles of puts and takes, over the time."""
    from replaybuf.web.plots import STEPS, Across, lines

    over_time = results["over_time"]

    def series(name: str, quantile: str | None = None) -> list[tuple[float, float]]:
        values = [(one["second"], one.get(name)) for one in over_time]
        if quantile is not None:
            values = [(second, (of or {}).get(quantile)) for second, of in values]
        return [(float(second), float(value)) for second, value in values if value is not None]

    quantiles = ("p50", "p90", "p99")
    put = "put_due" if results["per_second"]["due"] else "put"
    wanted = {
        "Groups a second": {"put": series("put_per_second"), "taken": series("taken_per_second")},
        "Groups in the buffer": {"groups": series("buffered")},
        f"Milliseconds of a {CALLS[put]}": {name: series(put, f"{name}_ms") for name in quantiles},
        "Milliseconds of a take": {name: series("take", f"{name}_ms") for name in quantiles},
    }
    across = Across(STEPS, "second", zoom=None)
    plots = [plot for title, of in wanted.items() if (plot := lines(title, of, across=across)) is not None]
    parts = [_placed(plot, place * (_TALL + 70) + 60) for place, plot in enumerate(plots)]
    height, width = len(plots) * (_TALL + 70) + 60, _PLOT + _LEFT + 2 * _EDGE
    head = "".join(
        f'<text x="{_EDGE}" y="{20 + 16 * place}">{_escaped(line)}</text>'
        for place, line in enumerate(_title(results)[:2])
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="white"/>{head}{"".join(parts)}</svg>\n'
    )


def _placed(plot: Any, top: int) -> str:
    keys, x = "", _EDGE + _LEFT + 220
    for style, name in plot.legend:
        keys += f'<rect class="key {style}" x="{x}" y="{top - 9}" width="9" height="9"/>'
        keys += f'<text x="{x + 13}" y="{top}">{_escaped(name)}</text>'
        x += 140
    left = _EDGE + _LEFT
    return (
        f'<text class="title" x="{_EDGE}" y="{top}">{_escaped(plot.title)}</text>{keys}'
        f'<svg x="{_EDGE}" y="{top + 14}" width="{_LEFT - 6}" height="{_TALL}">{plot.left}</svg>'
        f'<svg x="{left}" y="{top + 14}" width="{_PLOT}" height="{_TALL}">{plot.svg}</svg>'
        f'<svg x="{left}" y="{top + 18 + _TALL}" width="{_PLOT}" height="18">{plot.bottom}</svg>'
    )


def _escaped(text: str) -> str:
    from markupsafe import escape

    return str(escape(text))
