"""The time series of a database for Prometheus.

Names are stable. First draws and replays of groups have separate names, as in `buffer.metrics()`:
`replaybuf_groups_sampled_new_total` and `replaybuf_groups_sampled_again_total`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from replaybuf import __version__
from replaybuf.buffer.buffer_metrics import DISTRIBUTIONS, TOTALS, add_distributions, of_tasks
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.group_metadata import chosen_buffers
from replaybuf.storage.sql.inspection.measures import (
    count_overdue,
    count_unswept,
    held_by_tasks,
    histogram_of,
    list_places,
    read_contents,
    read_cursors,
    read_records,
    read_tallies,
)
from replaybuf.storage.sql.inspection.reader import Reader, Transaction, open_reader
from replaybuf.storage.sql.inspection.wait_facts import read_trainer

if TYPE_CHECKING:
    from replaybuf.storage.values import Cursor

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `path` is the path of its value in the figures of a buffer, or of the database.

    Each `*` in the path matches all keys at this place, which are the values of `labels`, in order; metrics of a buffer
    have the label `buffer` before them.
    """

    name: str
    kind: Kind
    path: str
    help: str
    labels: tuple[str, ...] = ()


_TOTAL_TEXTS = {
    "put": "Groups put, including those that were dropped at once.",
    "sampled_new": "Draws of completed groups that were never drawn before: what was generated now.",
    "sampled_again": "Draws of completed groups that were drawn before: what is replayed.",
    "taken": "Completed groups that left by being drawn.",
    "evicted": "Groups that left because the task was full.",
    "expired": "Groups that became EXPIRED in a refresh.",
    "dropped": "Groups that expired and weren't retryable.",
    "deleted": "Groups that were deleted by a query.",
    "replaced": "Groups that were replaced by another put.",
    "set_aside": "Groups that became FAILED: undecodable, or delivered too often.",
    "refused": "Puts that found no room.",
    "returned": "Leased groups that were given back.",
    "lease_expired": "Leased groups that came back because the lease ended.",
    "pruned": "Groups that left the archive, or were unfit and no longer kept.",
    "taken_unfinished": "Groups of other statuses that left by being drawn, to be finished or generated again.",
}
_LAST_HOUR_TEXTS = {
    "groups": "Groups put in the last hour",
    "rollouts": "Rollouts put in the last hour",
    "tokens": "Tokens of responses put in the last hour",
    "failures": "Failed groups put in the last hour",
    "taken": "Groups taken in the last hour",
}
_FIGURES = {"mean": "Mean", "p50": "Median", "p90": "90th percentile of the", "max": "Largest"}
_OF_GROUPS = {"staleness": "staleness, in train steps,", "times_sampled": "number of draws"}


def _gauge(name: str, path: str, help: str, *labels: str) -> Metric:
    return Metric(f"replaybuf_{name}", "gauge", path, help, labels)


def _counter(name: str, path: str, help: str, *labels: str) -> Metric:
    return Metric(f"replaybuf_{name}_total", "counter", path, help, labels)


#: Metrics of a buffer.
OF_BUFFER = (
    # Current groups
    _gauge("groups", "tasks/*/buffered/*", "Groups that can be drawn now.", "task", "status"),
    _gauge("leased_groups", "tasks/*/leased", "Groups that are leased now.", "task"),
    _gauge("overdue_groups", "tasks/*/overdue", "Leased groups whose lease is over.", "task"),
    _gauge("archived_groups", "tasks/*/archived", "Groups that are kept for SQL.", "task"),
    _gauge("payload_bytes", "tasks/*/bytes", "Size of the groups' payloads.", "task"),
    _gauge("oldest_group_timestamp_seconds", "tasks/*/oldest_at", "When the oldest completed group was put.", "task"),
    *(
        _gauge(f"{name}_{figure}", f"tasks/*/{name}/{figure}", f"{text} {what} of the completed groups.", "task")
        for name, what in _OF_GROUPS.items()
        for figure, text in _FIGURES.items()
    ),
    _gauge("reward_mean", "tasks/*/reward/mean", "Mean reward of the completed groups.", "task"),
    _gauge("reward_min", "tasks/*/reward/min", "Lowest reward of a completed group.", "task"),
    _gauge("reward_max", "tasks/*/reward/max", "Highest reward of a completed group.", "task"),
    # Totals since the beginning
    *(_counter(f"groups_{name}", f"tasks/*/{name}", _TOTAL_TEXTS[name], "task") for name in TOTALS),
    _gauge("restores", "restores", "Restores so far: each takes the counters back to a checkpoint."),
    # Waits
    _counter("waits", "waits/*/count", "Waits of this process.", "kind"),
    _counter("wait_seconds", "waits/*/seconds", "Time of these waits.", "kind"),
    _counter("wait_timeouts", "waits/*/timeouts", "Waits that timed out.", "kind"),
    _gauge("waiters", "waiters/*/count", "Waits under way, of all processes.", "kind"),
    _gauge("longest_wait_seconds", "waiters/*/longest_seconds", "How long the oldest of these has lasted.", "kind"),
    # Workers
    _gauge("workers", "workers/*", "Processes by their last sign of life.", "state"),
    *(
        _gauge(f"workers_{total}_last_hour", f"last_hour/{total}", f"{text} by all workers.")
        for total, text in _LAST_HOUR_TEXTS.items()
    ),
    _gauge("events_last_hour", "events_last_hour/*", "Events of the last hour: leases that lapsed, ...", "kind"),
    # The last draw of completed groups
    _gauge("last_batch_step", "last_batch/step", "Train step of the last batch."),
    _gauge("last_batch_groups", "last_batch/groups", "Groups of the last batch."),
    _gauge("last_batch_reward_mean", "last_batch/reward", "Mean reward of the last batch."),
    _gauge("last_batch_reward_min", "last_batch/min_reward", "Lowest reward of the last batch."),
    _gauge("last_batch_reward_max", "last_batch/max_reward", "Highest reward of the last batch."),
    _gauge("last_batch_staleness_mean", "last_batch/staleness", "Mean staleness of the last batch."),
    _gauge("last_batch_staleness_max", "last_batch/max_staleness", "Largest staleness of the last batch."),
    _gauge("last_batch_timestamp_seconds", "last_batch/taken_at", "When it was drawn."),
    # Progress of the run
    _gauge("trainer_step", "trainer/train_step", "The step that the trainer does next."),
    _gauge("trainer_model_step", "trainer/model_step", "The step of its newest weights."),
    _gauge("prompts_drawn", "prompts/*", "Prompts that were drawn from a dataset.", "dataset"),
    _gauge("checkpoints", "checkpoints/count", "Step checkpoints."),
    _gauge("last_checkpoint_step", "checkpoints/step", "Train step of the last checkpoint."),
    _gauge("last_checkpoint_timestamp_seconds", "checkpoints/created_at", "When the last checkpoint was made."),
)

#: Metrics of the whole database, or of the exporting process.
OF_DATABASE = (
    _gauge("info", "info/*", "The version that these metrics come from; always 1.", "version"),
    _gauge("up", "up", "Always 1; absent while the figures can't be read."),
    _gauge("database_bytes", "database/bytes", "Size of the database on disk, with SQLite's WAL."),
    _gauge("unswept_payloads", "database/unswept_payloads", "Payloads of groups that are gone, not deleted yet."),
    _gauge("payload_files", "database/places/*/files", "Files or objects with payloads that are kept apart.", "place"),
    _gauge("payload_file_bytes", "database/places/*/bytes", "Bytes of these files.", "place"),
    _gauge("payload_file_groups", "database/places/*/groups", "Groups with payloads in these files.", "place"),
)

METRICS = (*OF_BUFFER, *OF_DATABASE)


# Figures, and their time series

#: The maximum number of groups for which the distributions are computed, which scans them all.
SCANNED = 200_000


def read_figures(
    source: str | Reader, *, buffer: str | None = None, scanned: int = SCANNED, timeout: float | None = None
) -> dict[str, Any]:
    """Return the figures of one buffer of a database, or of all, as plain dicts; `prometheus` writes them. Blocks.

    `source` is a URL, the path of a SQLite file, or a reader. `buffers[name]["tasks"]` is as in `buffer.metrics()`.
    Staleness, draws, rewards and bytes of a buffer with more than `scanned` groups are left out, since computing them
    scans every group. Raises UnreachableError, InputError, LockedError (also when the read takes more than `timeout`
    seconds), ...
    """
    reader = open_reader(source) if isinstance(source, str) else source

    return reader.read(lambda tx: figures_of(tx, buffer, scanned), timeout=timeout)


def figures_of(tx: Transaction, buffer: str | None, scanned: int | None = None) -> dict[str, Any]:
    """Return the figures of one buffer of a database, or of all, as `read_figures` does; `scanned` may be None."""
    size, wal = tx.database_bytes()
    return {
        "database": {
            "schema": tx.revision(),
            "bytes": size,
            "wal_bytes": wal,
            "unswept_payloads": count_unswept(tx),
            "places": {place.pop("url"): place for place in list_places(tx)},
        },
        "buffers": {name: _figures(tx, name, scanned) for name in chosen_buffers(tx, buffer)},
    }


def _figures(tx: Transaction, name: str, scanned: int | None) -> dict[str, Any]:
    tallies, overdue = read_tallies(tx, name), Counter[str]()
    groups = sum(n for (_, _, tally), n in tallies.items() if tally in (Tally.SIZE, Tally.LEASED))
    contents = read_contents(tx, name) if scanned is None or groups <= scanned else ()
    tasks, held = of_tasks(tallies), held_by_tasks(contents)
    for field in DISTRIBUTIONS:
        add_distributions(tasks, field, histogram_of(contents, field))
    for (_, task, _), count in count_overdue(tx, name).items():
        overdue[task] += count
    for task, numbers in tasks.items():
        numbers |= {"overdue": overdue[task], **held.get(task, {})}
    trainer = read_trainer(tx, name)
    progress = {"prompts": prompts_drawn(read_cursors(tx, name)), "trainer": trainer and asdict(trainer)}
    return {"tasks": tasks, **read_records(tx, name), **progress}


def prompts_drawn(cursors: Sequence[Cursor]) -> dict[str, int]:
    """Return the number of prompts drawn from each dataset."""
    if not cursors:  # saves the import
        return {}
    from replaybuf.files.importing import IMPORT

    drawn = {cursor.name: cursor.position for cursor in cursors if not cursor.name.startswith((IMPORT, "replaybuf:"))}
    return dict(sorted(drawn.items()))


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def prometheus(figures: Mapping[str, Any], *, buffer: str = "default") -> str:
    """Return figures in Prometheus's text format, of the type CONTENT_TYPE.

    `figures` are those of `await buffer.metrics()`, and `buffer` the name of the buffer, or those of `read_figures`.
    """
    from prometheus_client import generate_latest

    registry: Any = SimpleNamespace(collect=lambda: _families(figures, buffer))
    return generate_latest(registry).decode()


def _families(figures: Mapping[str, Any], buffer: str) -> Iterator[Any]:
    """Yield the metric families of prometheus_client that have any sample."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    database = figures if "buffers" in figures else {"buffers": {buffer: figures}}
    of_database = [((), {"up": 1, "info": {__version__: 1}, **database})]
    of_buffers = [((name,), numbers) for name, numbers in database["buffers"].items()]
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    rows = [(item, ("buffer",), of_buffers) for item in OF_BUFFER] + [(item, (), of_database) for item in OF_DATABASE]
    for metric, labels, sources in rows:
        family = kinds[metric.kind](metric.name, metric.help, labels=[*labels, *metric.labels])
        for names, numbers in sources:
            for values, figure in _follow(metric.path.split("/"), numbers):
                if figure is not None:
                    family.add_metric([_encodable(text) for text in (*names, *values)], figure)
        if family.samples:
            yield family


def _follow(path: list[str], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values at a path, each with the keys that its stars matched."""
    if not path:
        yield (), value
    elif isinstance(value, Mapping):
        star = path[0] == "*"
        for name in value if star else (path[0],) if path[0] in value else ():
            for names, leaf in _follow(path[1:], value[name]):
                yield ((str(name), *names) if star else names), leaf


def _encodable(text: str) -> str:
    """Escape the lone surrogates of a label's value, which may be any text."""
    return text.encode("utf-8", "backslashreplace").decode()
