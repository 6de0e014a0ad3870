"""The metrics for Prometheus, as data: name, kind, path of the value in the figures, labels, and help text.

Names are stable. First draws and replays of groups have separate names, as in `buffer.metrics()`:
`replaybuf_groups_sampled_new_total` and `replaybuf_groups_sampled_again_total`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from replaybuf.buffer.metrics import TOTALS

Kind = Literal["counter", "gauge", "gaugehistogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `path` is the path of its value in the figures of a buffer, or of the database.

    Each `*` in the path matches all keys at this place, which are the values of `labels`, in order; metrics of a buffer
    have the label `buffer` before them. `bounds` are the upper bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    path: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[int, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its time series."""
        if self.kind == "gaugehistogram":
            return tuple(f"{self.name}_{end}" for end in ("bucket", "gcount", "gsum"))
        return (self.name,)


_OF_TOTALS = {
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
_OF_LAST_HOUR = {
    "groups": "Groups put in the last hour",
    "rollouts": "Rollouts put in the last hour",
    "tokens": "Tokens of responses put in the last hour",
    "failures": "Failed groups put in the last hour",
    "taken": "Groups taken in the last hour",
}
_STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_DRAWS = (0, 1, 2, 4, 8, 16, 32, 64)
_TASK = ("task",)

#: Metrics of a buffer.
OF_BUFFER = (
    # Current groups
    Metric("replaybuf_groups", "gauge", "tasks/*/buffered/*", "Groups that can be drawn now.", ("task", "status")),
    Metric("replaybuf_leased_groups", "gauge", "tasks/*/leased", "Groups that are leased now.", _TASK),
    Metric("replaybuf_overdue_groups", "gauge", "tasks/*/overdue", "Leased groups whose lease is over.", _TASK),
    Metric("replaybuf_archived_groups", "gauge", "tasks/*/archived", "Groups that are kept for SQL.", _TASK),
    Metric("replaybuf_payload_bytes", "gauge", "tasks/*/bytes", "Size of the groups' payloads.", _TASK),
    Metric(
        *("replaybuf_oldest_group_timestamp_seconds", "gauge", "tasks/*/oldest_at"),
        *("When the oldest completed group was put.", _TASK),
    ),
    Metric(
        *("replaybuf_staleness", "gaugehistogram", "tasks/*/staleness/counts"),
        *("Completed groups by staleness, in train steps.", _TASK, _STEPS),
    ),
    Metric(
        *("replaybuf_times_sampled", "gaugehistogram", "tasks/*/times_sampled/counts"),
        *("Completed groups by the number of their draws.", _TASK, _DRAWS),
    ),
    Metric("replaybuf_reward_mean", "gauge", "tasks/*/reward/mean", "Mean reward of the completed groups.", _TASK),
    Metric("replaybuf_reward_min", "gauge", "tasks/*/reward/min", "Lowest reward of a completed group.", _TASK),
    Metric("replaybuf_reward_max", "gauge", "tasks/*/reward/max", "Highest reward of a completed group.", _TASK),
    # Totals since the beginning
    *(
        Metric(f"replaybuf_groups_{name}_total", "counter", f"tasks/*/{name}", _OF_TOTALS[name], _TASK)
        for name in TOTALS
    ),
    Metric("replaybuf_restores", "gauge", "restores", "Restores so far: each takes the counters back to a checkpoint."),
    # Waits
    Metric("replaybuf_waits_total", "counter", "waits/*/count", "Waits of this process.", ("kind",)),
    Metric("replaybuf_wait_seconds_total", "counter", "waits/*/seconds", "Time of these waits.", ("kind",)),
    Metric("replaybuf_wait_timeouts_total", "counter", "waits/*/timeouts", "Waits that timed out.", ("kind",)),
    Metric("replaybuf_waiters", "gauge", "waiters/*/count", "Waits under way, of all processes.", ("kind",)),
    Metric(
        *("replaybuf_longest_wait_seconds", "gauge", "waiters/*/longest_seconds"),
        *("How long the oldest of the waits under way has lasted.", ("kind",)),
    ),
    # Workers
    Metric("replaybuf_workers", "gauge", "workers/*", "Processes by their last sign of life.", ("state",)),
    *(
        Metric(f"replaybuf_workers_{what}_last_hour", "gauge", f"last_hour/{what}", f"{help} by all workers.")
        for what, help in _OF_LAST_HOUR.items()
    ),
    Metric(
        *("replaybuf_events_last_hour", "gauge", "events_last_hour/*"),
        *("Events of the last hour: leases that lapsed, groups set aside, ...", ("kind",)),
    ),
    # The last draw of completed groups
    Metric("replaybuf_last_batch_step", "gauge", "last_batch/step", "Train step of the last batch."),
    Metric("replaybuf_last_batch_groups", "gauge", "last_batch/groups", "Groups of the last batch."),
    Metric("replaybuf_last_batch_reward_mean", "gauge", "last_batch/reward", "Mean reward of the last batch."),
    Metric("replaybuf_last_batch_reward_min", "gauge", "last_batch/min_reward", "Lowest reward of the last batch."),
    Metric("replaybuf_last_batch_reward_max", "gauge", "last_batch/max_reward", "Highest reward of the last batch."),
    Metric("replaybuf_last_batch_staleness_mean", "gauge", "last_batch/staleness", "Mean staleness of the last batch."),
    Metric(
        *("replaybuf_last_batch_staleness_max", "gauge", "last_batch/max_staleness"),
        "Largest staleness of the last batch.",
    ),
    Metric("replaybuf_last_batch_timestamp_seconds", "gauge", "last_batch/taken_at", "When it was drawn."),
    # Progress of the run
    Metric("replaybuf_trainer_step", "gauge", "trainer/train_step", "The step that the trainer does next."),
    Metric("replaybuf_trainer_model_step", "gauge", "trainer/model_step", "The step of its newest weights."),
    Metric("replaybuf_prompts_drawn", "gauge", "prompts/*", "Prompts that were drawn from a dataset.", ("dataset",)),
    Metric("replaybuf_checkpoints", "gauge", "checkpoints/count", "Step checkpoints."),
    Metric("replaybuf_last_checkpoint_step", "gauge", "checkpoints/step", "Train step of the last checkpoint."),
    Metric(
        *("replaybuf_last_checkpoint_timestamp_seconds", "gauge", "checkpoints/created_at"),
        "When the last checkpoint was made.",
    ),
)

#: Metrics of the whole database, or of the exporting process.
OF_DATABASE = (
    Metric("replaybuf_info", "gauge", "info/*", "The version that these metrics come from; always 1.", ("version",)),
    Metric("replaybuf_up", "gauge", "up", "Whether the figures could be read (1) or not (0)."),
    Metric("replaybuf_database_bytes", "gauge", "database/bytes", "Size of the database on disk."),
    Metric(
        *("replaybuf_unswept_payloads", "gauge", "database/unswept_payloads"),
        "Payloads of groups that are gone, which wait to be deleted.",
    ),
    Metric(
        *("replaybuf_payload_files", "gauge", "database/places/*/files"),
        *("Files or objects with payloads that are kept apart.", ("place",)),
    ),
    Metric(
        *("replaybuf_payload_file_bytes", "gauge", "database/places/*/bytes"),
        *("Bytes of these files.", ("place",)),
    ),
    Metric(
        *("replaybuf_payload_file_groups", "gauge", "database/places/*/groups"),
        *("Groups that have payloads in these files.", ("place",)),
    ),
)

METRICS = (*OF_BUFFER, *OF_DATABASE)
