"""A run, observed from outside: Prometheus, OpenTelemetry's names, and tables of completions for loggers.

`docs/metrics.md` has every name. None of it needs another package, but for what is made into another's objects.
"""

from replaybuf.observe.catalogue import METRICS as METRICS
from replaybuf.observe.catalogue import Metric as Metric
from replaybuf.observe.collector import Collector as Collector
from replaybuf.observe.database import read_figures as read_figures
from replaybuf.observe.exposition import CONTENT_TYPE as CONTENT_TYPE
from replaybuf.observe.exposition import OPENMETRICS_CONTENT_TYPE as OPENMETRICS_CONTENT_TYPE
from replaybuf.observe.exposition import prometheus as prometheus
