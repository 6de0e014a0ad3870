"""Prometheus's text format, and OpenMetrics.

Both have the same series. Prometheus's format lacks histograms of what is there now, which may become fewer: there the
buckets are a `histogram`, and `_gcount` and `_gsum` gauges beside it, as prometheus_client does it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from replaybuf.observe.catalogue import Metric
from replaybuf.observe.samples import Sample, samples_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def prometheus(
    figures: Mapping[str, Any], *, buffer: str = "default", openmetrics: bool = False, only: str = ""
) -> str:
    """Return figures as the text that Prometheus reads, of the type CONTENT_TYPE (or OPENMETRICS_CONTENT_TYPE).

    `figures` are those of `await buffer.metrics()`, and `buffer` the name of the buffer, or those of `read_figures`.
    Rates are left out: Prometheus makes its own. With `only` there are the metrics whose names begin so.
    """
    chosen = [(metric, samples) for metric, samples in samples_of(figures, buffer) if metric.name.startswith(only)]
    lines = [line for metric, samples in chosen for line in _lines(metric, samples, openmetrics)]
    if openmetrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _lines(metric: Metric, samples: Iterable[Sample], openmetrics: bool) -> Iterator[str]:
    if metric.kind == "gaugehistogram" and not openmetrics:
        samples = list(samples)
        for series in metric.series:
            kind, name = ("histogram", metric.name) if series.endswith("_bucket") else ("gauge", series)
            yield from _head(name, kind, metric.help)
            yield from (_line(sample) for sample in samples if sample.series == series)
        return
    name = metric.name.removesuffix("_total") if openmetrics and metric.kind == "counter" else metric.name
    yield from _head(name, metric.kind, metric.help)
    yield from map(_line, samples)


def _head(name: str, kind: str, help: str) -> tuple[str, str]:
    return f"# HELP {name} {help}", f"# TYPE {name} {kind}"


def _line(sample: Sample) -> str:
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels.items())
    return f"{sample.series}{f'{{{labels}}}' if labels else ''} {_number(sample.value)}"


def _escaped(text: str) -> str:
    """Return a label's value in quotes' form; it may be any text."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return text.encode("utf-8", "backslashreplace").decode("utf-8")  # lone surrogates are no text


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
