"""SQL of users: it only reads, from the public views above all, whose columns have a name, a type and a meaning.

Meanings are Markdown, for the tables of docs/sql.md, without links.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from replaybuf.common.units import brief
from replaybuf.errors import AccessError, QueryError, StorageError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.reader import Reader

# Read-only transaction, change of the transaction, COMMIT inside of DO.
_WRITE_STATES = {"25006", "25001", "2D000"}
#: What SQLite says of the same, and PostgreSQL of a write to a view that can't be written to.
_WRITES = (
    "readonly database",
    "because it is a view",
    "too many attached databases",
    "cannot insert into view",
    "cannot update view",
    "cannot delete from view",
)
#: The maximum length of a database's message, which may quote the whole statement.
_LONGEST_MESSAGE = 300


class ViewColumn(NamedTuple):
    """A column: its name, type ("integer", "number", "text", "time", "JSON") and meaning."""

    name: str
    type: str
    meaning: str = ""


class View(NamedTuple):
    """A view: the meaning of its rows, and its columns in order."""

    row: str
    columns: Sequence[ViewColumn]


def _numbered(names: Sequence[str]) -> list[str]:
    """Return the names with numbers after repeated ones."""
    result = list[str]()
    for name in names:
        candidate, number = name, 1
        while candidate in result:
            number += 1
            candidate = f"{name}_{number}"
        result.append(candidate)
    return result


def run_statement(reader: Reader, statement: str, timeout: float) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of columns, and all rows; no names when the statement returns no rows.

    Columns of one name are numbered: `reward`, `reward_2`.

    Raises AccessError when it would write, LockedError after `timeout` seconds, QueryError when it is invalid, and
    UnicodeEncodeError when it isn't text.
    """
    statement.encode()  # asyncpg would lose its connection

    def run(tx: Transaction) -> tuple[list[str], list[dict[str, Any]]]:
        given, rows = tx.table(statement)
        names = _numbered(given)
        return names, [dict(zip(names, row, strict=True)) for row in rows]

    try:
        return reader.read_any(run, timeout=timeout)
    except StorageError as error:
        _explain(error)
    except (sqlite3.Warning, sqlite3.ProgrammingError) as error:  # the latter in 3.11
        raise QueryError(str(error)) from error


def _explain(error: StorageError) -> NoReturn:
    """Raise the error for a user that a database error of a statement stands for."""
    cause = error.__cause__ or error
    state = getattr(cause, "sqlstate", None)
    message = brief(str(cause), _LONGEST_MESSAGE)
    if state in _WRITE_STATES or any(words in message for words in _WRITES):
        raise AccessError(f"statements only read here, and the database refused this one: {message}") from error
    if type(error) is StorageError:
        # The statement is at fault: the message needs no URL.
        raise QueryError(f"{message}; `replaybuf sql URL` lists the views and their columns") from error
    raise error


def _views(text: str) -> dict[str, View]:
    """Parse the views of a text: a line for each view, then one for each column; indented lines continue a column."""
    views = {}
    for block in text.strip().split("\n\n"):
        head, *columns = block.replace("\n    ", " ").splitlines()
        name, _, row = head.partition(": a row for each ")
        views[name] = View(row, [ViewColumn(*column.split(" | ")) for column in columns])
    return views


VIEW_COLUMNS = _views("""
groups: a row for each group that is there: buffered, leased, or kept for SQL after it was trained on (`archive=`)
uid | integer | higher for later puts
timestamp_id | integer | `uid`, by xtuner's name
buffer | text
task_name | text
status | text | `completed`, `aborted`, `init`, `expired`, `filtered`, `failed`, `archived`, `filling`
staleness | integer | of its oldest rollout
priority | number | of prioritized draws
times_sampled | integer | draws of it so far
created_at | time | when it was put
leased_until | time | end of its lease; NULL: not leased
archived_at | time | since when it is archived, filtered, failed or filling
deliveries | integer | leases begun
reward | number | mean of its rollouts that have one
rollouts | integer | their number, whatever segments they consist of
prompt_tokens | integer | of all rollouts
response_tokens | integer | of all that aren't expired
finish_reasons | text | how many rollouts have which: `length:1 stop:7`
prompt | text | the last message, up to 200 characters and `…`
response | text | the first rollout's, up to 200 characters and `…`
tags | JSON | what the put said
key | text | the put's key, or the name of a group that fills
group_size | integer | of a rollout of a group that fills: the rollouts that the group shall have
group_index | integer | its place among them
error | text | why it was set aside, or the first error of a rollout
bytes | integer | size of its payload
worker | text | that put it
put_step | integer | train step of the put
leased_by | text | worker that leases it
trained_step | integer | train step of its last draw for good or acknowledged lease
full_prompt | text | the last message, whole
messages | JSON | the conversation, if of 2 to 100 messages: `[{"role": "system", "content": "Add."}, ...]`

rollouts: a row for each rollout of these groups, or for each [segment](segments.md) of one
uid | integer | of its group
position | integer | in its group, from 0
buffer | text
task_name | text
rollout_id | text | the rollout's own
status | text | the rollout's own, or `expired` since
staleness | integer | train steps
oldest_model_step | integer | model step of its oldest token
reward | number | a number, or the part of a dict that `reward_key=` names (`score`)
rewards | JSON | the parts of a dict reward that are numbers or texts: `{"score": 1.0, "format": 0.5}`
prompt_tokens | integer
response_tokens | integer | 0 once it is expired
finish_reason | text | `stop`, `length`, ...
prompt | text | the group's, up to 200 characters and `…`
response | text | up to 200 characters and `…`; empty once it is expired
error_msg | text | its own, up to 200 characters and `…`
full_response | text | whole
worker | text | that put the group
rollout | integer | its number in the group; segments of one have the same
parent | integer | `position` of the segment that it continues

batches: a row for each draw: who took how many groups, for which train step
id | integer | later draws have higher ones
buffer | text
taken_at | time | when it was drawn
step | integer | train step that it was drawn for; NULL for groups drawn to be generated again
status | text | status of the groups that were drawn
worker | text | that drew
lease | integer | number of the lease; NULL: drawn for good
tasks | text | groups of each task: `code:16 math:48`
groups | integer | their number
settled | integer | of these, drawn for good or acknowledged
reward | number | mean of the groups'
min_reward | number | the lowest of the groups'
max_reward | number | the highest of the groups'
staleness | number | mean of the groups'
max_staleness | integer | the highest of the groups'
oldest_model_step | integer | of the groups' oldest tokens, the oldest
newest_model_step | integer | of the groups' oldest tokens, the newest
restores | integer | restores of the buffer before it: a restore undoes what came before, but it stays listed
first_uid | integer | the lowest uid
last_uid | integer | the highest uid

batch_groups: a row for each group of each draw, also of those that are gone
batch | integer | `batches.id`
buffer | text
step | integer | train step of the batch
taken_by | text | worker that drew
uid | integer | the group's; in `groups` as long as it is there
task_name | text
worker | text | that put it
reward | number | the group's when it was drawn
staleness | integer | then
oldest_model_step | integer | then
created_at | time | when it was put
first_uid | integer | of the batch
last_uid | integer | of the batch

annotations: a row for each value that a trainer wrote about a drawn group or rollout ([how](looking.md#annotations))
batch | integer | `batches.id` of the draw
buffer | text
step | integer | train step of the draw
restores | integer | restores of the buffer before the draw
uid | integer | the group's
task_name | text
worker | text | that put the group
name | text
position | integer | of the rollout in its group, from 0; NULL: of the group
value | number | a number, 1 or 0 for a bool, or the mean of an array
text | text | if it is a text
min_value | number | of an array
max_value | number | of an array
tokens | integer | length of an array

leases: a row for each lease and task that somebody holds at this moment
lease | integer | its number, as in `batches`
buffer | text
task_name | text | a lease of several tasks has a row for each
status | text | of the groups
worker | text | that holds it
since | time | when it was drawn
until | time | when it ends, unless renewed
groups | integer | neither acknowledged nor given back
deliveries | integer | leases of the group with the most
step | integer | train step that it was drawn for

checkpoints: a row for each step checkpoint
buffer | text
step | integer | of the weights that belong to it
created_at | time | when it was made
groups | integer | in it
bytes | integer | of their payloads, which are kept once for all checkpoints

waiters: a row for each call that waits for groups, for room or for the trainer at this moment, and why
buffer | text
worker | text | that waits
host | text | its machine
pid | integer | its process
kind | text | `groups`: a draw; `room`: a put; `trainer`: a producer
wants | JSON | groups by task: `{"math": 64}`
status | text | of the groups that it wants
query | text | JSON of its `where`
since | time | when the wait began
deadline | time | when it gives up; NULL: never
seen_at | time | last sign of life
reason | text | what is missing, in a sentence
limits | JSON | limits of its config

workers: a row for each process that puts or takes under a name
buffer | text
worker | text | its name
host | text | its machine
pid | integer | its process
started_at | time | first sign of life
last_seen | time | last one: every 5 seconds while it does something, else every 30
ended_at | time | when it closed the buffer; NULL: it works, or was killed
groups_last_hour | integer | put
rollouts_last_hour | integer | put
tokens_last_hour | integer | of the responses put
failures_last_hour | integer | groups put as FAILED, and failed deliveries given back
taken_last_hour | integer | groups drawn

events: a row for each thing that happens seldom: a lease that lapsed, groups set aside, a restore, ...
id | integer | later ones have higher ones
buffer | text
happened_at | time | when
kind | text | `lease_lapsed`, `given_back`, `set_aside`, `left_out` (unfit rollouts of a group, as one of their own),
    `expired`, `deleted`, `requeued`, `refused`, `imported`, `checkpoint`, `checkpoint_dropped`, `restored`, `gave_up`,
    `dataset_ended`
task_name | text | of what task, if of one
worker | text | that did it, or held the groups
step | integer | train step: of a refresh, a checkpoint or a restore
groups | integer | how many it is about
uids | JSON | the lowest 100 of them
detail | text | why

places: a row for each place where payloads are kept apart (`payloads=`)
url | text | a folder, or the URL of an object store
files | integer | files or objects there
groups | integer | whose payloads are in them, also those of leases and checkpoints
bytes | integer | of the files, each of which goes when its last group has gone
""")
