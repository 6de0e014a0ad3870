"""Observability: metrics for Prometheus, numbers and tables for wandb and trackio. See `docs/metrics.md`.

Each name is imported at its first use, so that a reader of a database doesn't import the buffer. OpenTelemetry spans
don't use this package: the buffer makes them by itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replaybuf.view.metrics.catalogue import METRICS as METRICS
    from replaybuf.view.metrics.catalogue import Metric as Metric
    from replaybuf.view.metrics.completions import as_markdown as as_markdown
    from replaybuf.view.metrics.completions import batch_metrics as batch_metrics
    from replaybuf.view.metrics.completions import completions_table as completions_table
    from replaybuf.view.metrics.exposition import CONTENT_TYPE as CONTENT_TYPE
    from replaybuf.view.metrics.exposition import Collector as Collector
    from replaybuf.view.metrics.exposition import prometheus as prometheus
    from replaybuf.view.metrics.exposition import read_figures as read_figures

_NAMES = {
    "catalogue": ("METRICS", "Metric"),
    "completions": ("as_markdown", "batch_metrics", "completions_table"),
    "exposition": ("CONTENT_TYPE", "Collector", "prometheus", "read_figures"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # type checkers use the imports above
    __all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if module := _MODULES.get(name):
        value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
