"""`replaybuf metrics`: the figures of a database for monitoring."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from replaybuf.cli.options import Buffer, Url, listing, option
from replaybuf.cli.output import Column, Output, write
from replaybuf.observe.exposition import SCANNED, prometheus, read_figures, samples_of
from replaybuf.redact import escape
from replaybuf.storage.sql.inspection.reader import open_reader

_Scanned = Annotated[
    int,
    option(
        *("--scanned",),
        metavar="N",
        min=0,
        help="Leave out staleness, draws, rewards and bytes of buffers with more groups: they look at every group.",
    ),
]
_Only = Annotated[str, option("--only", metavar="NAME", help="Only the metrics whose names begin like this.")]


@listing
def metrics(url: Url, output: Output, buffer: Buffer = None, only: _Only = "", scanned: _Scanned = SCANNED) -> None:
    """Print the figures of a database as Prometheus reads them, for node_exporter's textfile collector and the like.

    Each is preceded by its meaning. "replaybuf serve" gives the same at /metrics, and a trainer with an endpoint of its
    own registers a collector (docs/metrics.md). With --json they are nested, as buffer.metrics() has them, and all of
    them; with --table, --nl and --csv each number is a row with its labels.

    \b
    Examples:
      replaybuf metrics run.db
      replaybuf metrics run.db --only replaybuf_groups_ --csv
      replaybuf metrics run.db > rl.tmp && mv rl.tmp /var/lib/node_exporter/replaybuf.prom
      replaybuf metrics postgresql://rl@db/run7 --json | jq .buffers.default.last_batch
    """
    reader = open_reader(url)
    figures = read_figures(reader, buffer=buffer, scanned=scanned)
    if output.format == "json":
        output.value(figures)
    elif output.asked:
        rows = _rows(figures, only)
        output.rows(rows, _columns(rows))
    else:
        text = prometheus(figures, only=only)
        write([escape(text, keep="\n") if sys.stdout.isatty() else text])


_LABELS = ("buffer", "task", "status", "kind", "state", "dataset", "version", "le")


def _rows(figures: dict[str, Any], only: str) -> list[dict[str, Any]]:
    return [
        {"name": sample.series, **{name: sample.labels.get(name) for name in _LABELS}, "value": sample.value}
        for metric, samples in samples_of(figures, "")
        for sample in samples
        if metric.name.startswith(only)
    ]


def _columns(rows: list[dict[str, Any]]) -> list[Column]:
    """Return the columns for people: without labels that none of these has."""
    labels = [name for name in _LABELS if any(row[name] is not None for row in rows)]
    texts = [Column(name, lambda r, name=name: r[name] or "", right=False, text=True) for name in ("name", *labels)]  # type: ignore[misc]
    return [*texts, Column("value", lambda r: f"{r['value']:.12g}")]
