"""What the views for people have: their columns, of which type, and what each means.

Meanings are Markdown, for docs/sql.md, which has these tables.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class ViewColumn(NamedTuple):
    """A column: its name, its type ("integer", "number", "text", "time", "JSON"), and what it means."""

    name: str
    type: str
    meaning: str = ""


class View(NamedTuple):
    """A view: what there is a row for, and its columns in their order."""

    row: str
    columns: Sequence[ViewColumn]


_MARKUP = re.compile(r"`|\[([^]]*)\]\([^)]*\)")


def without_markup(text: str) -> str:
    """Return the words of a Markdown text: of links what they are of."""
    return _MARKUP.sub(lambda match: match[1] or "", text)


VIEW_COLUMNS = {
    "groups": View(
        "group that is there: buffered, leased, or kept for SQL after it was trained on (`archive=`)",
        (
            ViewColumn("uid", "integer", "higher for later puts"),
            ViewColumn("timestamp_id", "integer", "`uid`, by xtuner's name"),
            ViewColumn("buffer", "text"),
            ViewColumn("task_name", "text"),
            ViewColumn("status", "text", "`completed`, `aborted`, `init`, `expired`, `filtered`, `failed`, `archived`"),
            ViewColumn("staleness", "integer", "of its oldest rollout"),
            ViewColumn("priority", "number", "of prioritized draws"),
            ViewColumn("times_sampled", "integer", "draws of it so far"),
            ViewColumn("created_at", "time", "when it was put"),
            ViewColumn("leased_until", "time", "end of its lease; NULL: not leased"),
            ViewColumn("archived_at", "time", "since when it is archived, filtered or failed"),
            ViewColumn("deliveries", "integer", "leases begun"),
            ViewColumn("reward", "number", "mean of its rollouts that have one"),
            ViewColumn("rollouts", "integer", "their number"),
            ViewColumn("prompt_tokens", "integer", "of all rollouts"),
            ViewColumn("response_tokens", "integer", "of all that aren't expired"),
            ViewColumn("finish_reasons", "text", "how many rollouts have which: `length:1 stop:7`"),
            ViewColumn("prompt", "text", "the last message, up to 200 characters and `…`"),
            ViewColumn("response", "text", "the first rollout's, up to 200 characters and `…`"),
            ViewColumn("tags", "JSON", "what the put said"),
            ViewColumn("key", "text", "the put's key"),
            ViewColumn("error", "text", "why it was set aside, or the first error of a rollout"),
            ViewColumn("bytes", "integer", "size of its payload"),
            ViewColumn("worker", "text", "that put it"),
            ViewColumn("put_step", "integer", "train step of the put"),
            ViewColumn("leased_by", "text", "worker that leases it"),
            ViewColumn("trained_step", "integer", "train step of its last draw for good or acknowledged lease"),
            ViewColumn("full_prompt", "text", "the last message, whole"),
            ViewColumn(
                "messages",
                "JSON",
                'the conversation, if of 2 to 100 messages: `[{"role": "system", "content": "Add."}, ...]`',
            ),
        ),
    ),
    "rollouts": View(
        "rollout of these groups",
        (
            ViewColumn("uid", "integer", "of its group"),
            ViewColumn("position", "integer", "in its group, from 0"),
            ViewColumn("buffer", "text"),
            ViewColumn("task_name", "text"),
            ViewColumn("rollout_id", "text", "the rollout's own"),
            ViewColumn("status", "text", "the rollout's own, or `expired` since"),
            ViewColumn("staleness", "integer", "train steps"),
            ViewColumn("oldest_model_step", "integer", "model step of its oldest token"),
            ViewColumn("reward", "number", "a number, or the part of a dict that `reward_key=` names (`score`)"),
            ViewColumn(
                "rewards",
                "JSON",
                'the parts of a dict reward that are numbers or texts: `{"score": 1.0, "format": 0.5}`',
            ),
            ViewColumn("prompt_tokens", "integer"),
            ViewColumn("response_tokens", "integer", "0 once it is expired"),
            ViewColumn("finish_reason", "text", "`stop`, `length`, ..."),
            ViewColumn("prompt", "text", "the group's, up to 200 characters and `…`"),
            ViewColumn("response", "text", "up to 200 characters and `…`; empty once it is expired"),
            ViewColumn("error_msg", "text", "its own, up to 200 characters and `…`"),
            ViewColumn("full_response", "text", "whole"),
            ViewColumn("worker", "text", "that put the group"),
        ),
    ),
    "batches": View(
        "draw: who took how many groups, for which train step",
        (
            ViewColumn("id", "integer", "later draws have higher ones"),
            ViewColumn("buffer", "text"),
            ViewColumn("taken_at", "time", "when it was drawn"),
            ViewColumn(
                "step",
                "integer",
                "train step that it was drawn for ([what is recorded](trace.md#what-is-recorded)); NULL for groups "
                "drawn to be generated again",
            ),
            ViewColumn("status", "text", "status of the groups that were drawn"),
            ViewColumn("worker", "text", "that drew"),
            ViewColumn("lease", "integer", "number of the lease; NULL: drawn for good"),
            ViewColumn("tasks", "text", "groups of each task: `code:16 math:48`"),
            ViewColumn("groups", "integer", "their number"),
            ViewColumn("settled", "integer", "of these, drawn for good or acknowledged"),
            ViewColumn("reward", "number", "mean of the groups'"),
            ViewColumn("min_reward", "number", "the lowest of the groups'"),
            ViewColumn("max_reward", "number", "the highest of the groups'"),
            ViewColumn("staleness", "number", "mean of the groups'"),
            ViewColumn("max_staleness", "integer", "the highest of the groups'"),
            ViewColumn("oldest_model_step", "integer", "of the groups' oldest tokens, the oldest"),
            ViewColumn("newest_model_step", "integer", "of the groups' oldest tokens, the newest"),
            ViewColumn(
                "restores",
                "integer",
                "restores of the buffer before it: a restore undoes what came before, but it stays listed",
            ),
            ViewColumn("first_uid", "integer", "the lowest uid"),
            ViewColumn("last_uid", "integer", "the highest uid"),
        ),
    ),
    "batch_groups": View(
        "group of each draw, also of those that are gone",
        (
            ViewColumn("batch", "integer", "`batches.id`"),
            ViewColumn("buffer", "text"),
            ViewColumn("step", "integer", "train step of the batch"),
            ViewColumn("taken_by", "text", "worker that drew"),
            ViewColumn("uid", "integer", "the group's; in `groups` as long as it is there"),
            ViewColumn("task_name", "text"),
            ViewColumn("worker", "text", "that put it"),
            ViewColumn("reward", "number", "the group's when it was drawn"),
            ViewColumn("staleness", "integer", "then"),
            ViewColumn("oldest_model_step", "integer", "then"),
            ViewColumn("created_at", "time", "when it was put"),
            ViewColumn("first_uid", "integer", "of the batch"),
            ViewColumn("last_uid", "integer", "of the batch"),
        ),
    ),
    "leases": View(
        "lease and task that somebody holds at this moment",
        (
            ViewColumn("lease", "integer", "its number, as in `batches`"),
            ViewColumn("buffer", "text"),
            ViewColumn("task_name", "text", "a lease of several tasks has a row for each"),
            ViewColumn("status", "text", "of the groups"),
            ViewColumn("worker", "text", "that holds it"),
            ViewColumn("since", "time", "when it was drawn"),
            ViewColumn("until", "time", "when it ends, unless renewed"),
            ViewColumn("groups", "integer", "neither acknowledged nor given back"),
            ViewColumn("deliveries", "integer", "leases of the group with the most"),
            ViewColumn("step", "integer", "train step that it was drawn for"),
        ),
    ),
    "checkpoints": View(
        "step checkpoint",
        (
            ViewColumn("buffer", "text"),
            ViewColumn("step", "integer", "of the weights that belong to it"),
            ViewColumn("created_at", "time", "when it was made"),
            ViewColumn("groups", "integer", "in it"),
            ViewColumn("bytes", "integer", "of their payloads, which are kept once for all checkpoints"),
        ),
    ),
    "waiters": View(
        "call that waits for groups, for room or for the trainer at this moment, and why",
        (
            ViewColumn("buffer", "text"),
            ViewColumn("worker", "text", "that waits"),
            ViewColumn("host", "text", "its machine"),
            ViewColumn("pid", "integer", "its process"),
            ViewColumn("kind", "text", "`groups`: a draw; `room`: a put; `trainer`: a producer"),
            ViewColumn("wants", "JSON", 'groups by task: `{"math": 64}`'),
            ViewColumn("status", "text", "of the groups that it wants"),
            ViewColumn("query", "text", "JSON of its `where`"),
            ViewColumn("since", "time", "when the wait began"),
            ViewColumn("deadline", "time", "when it gives up; NULL: never"),
            ViewColumn("seen_at", "time", "last sign of life"),
            ViewColumn("reason", "text", "what is missing, in a sentence"),
            ViewColumn("limits", "JSON", "limits of its config"),
        ),
    ),
    "workers": View(
        "process that puts or takes under a name",
        (
            ViewColumn("buffer", "text"),
            ViewColumn("worker", "text", "its name"),
            ViewColumn("host", "text", "its machine"),
            ViewColumn("pid", "integer", "its process"),
            ViewColumn("started_at", "time", "first sign of life"),
            ViewColumn("last_seen", "time", "last one: every 5 seconds while it does something, else every 30"),
            ViewColumn("ended_at", "time", "when it closed the buffer; NULL: it works, or was killed"),
            ViewColumn("groups_last_hour", "integer", "put"),
            ViewColumn("rollouts_last_hour", "integer", "put"),
            ViewColumn("tokens_last_hour", "integer", "of the responses put"),
            ViewColumn("failures_last_hour", "integer", "groups put as FAILED, and failed deliveries given back"),
            ViewColumn("taken_last_hour", "integer", "groups drawn"),
        ),
    ),
    "events": View(
        "thing that happens seldom: a lease that lapsed, groups set aside, a restore, ...",
        (
            ViewColumn("id", "integer", "later ones have higher ones"),
            ViewColumn("buffer", "text"),
            ViewColumn("happened_at", "time", "when"),
            ViewColumn(
                "kind",
                "text",
                "`lease_lapsed`, `given_back`, `set_aside`, `expired`, `deleted`, `requeued`, `refused`, `imported`, "
                "`checkpoint`, `checkpoint_dropped`, `restored`, `gave_up`, `dataset_ended`, `limits`",
            ),
            ViewColumn("task_name", "text", "of what task, if of one"),
            ViewColumn("worker", "text", "that did it, or held the groups"),
            ViewColumn("step", "integer", "train step: of a refresh, a checkpoint or a restore"),
            ViewColumn("groups", "integer", "how many it is about"),
            ViewColumn("uids", "JSON", "the lowest 100 of them"),
            ViewColumn("detail", "text", "why"),
        ),
    ),
}
