"""Observability: metrics for Prometheus, numbers and tables for wandb and trackio. See `docs/metrics.md`.

The names of `completions`, which needs the modules of rollouts, are imported at their first use. OpenTelemetry spans
don't use this package: the buffer makes them by itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from replaybuf.view.metrics.exposition import CONTENT_TYPE, METRICS, Collector, Metric, prometheus, read_figures

if TYPE_CHECKING:
    from replaybuf.view.metrics.completions import as_markdown, batch_metrics, completions_table

__all__ = [
    "CONTENT_TYPE",
    "METRICS",
    "Collector",
    "Metric",
    "as_markdown",
    "batch_metrics",
    "completions_table",
    "prometheus",
    "read_figures",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.completions"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
