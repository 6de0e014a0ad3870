"""SQL of people, read-only: running one statement of a user, and the questions that docs/sql.md answers in SQL."""

from __future__ import annotations

import difflib
import re
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from replaybuf.errors import AccessError, LockedError, QueryError, StorageError
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction

_WRITES = {"25006", "25001", "2D000"}  # read-only transaction, change of the transaction, COMMIT inside of DO
# PostgreSQL rewrites a view before it looks whether the transaction may write.
_WRITES_TO_VIEW = re.compile(r"^cannot (modify|delete from|update|insert into) .*view")
_INSTEAD = {
    "delete": "; `replaybuf rm` deletes groups",
    "update": "; a program changes groups by `await buffer.update(query, ...)`",
}
# Functions with these rights write files and start programs in transactions that are read-only, too.
_REACHES_THE_SERVER = """
SELECT bool_or(rolsuper OR pg_has_role(session_user, 'pg_execute_server_program', 'MEMBER')
    OR pg_has_role(session_user, 'pg_write_server_files', 'MEMBER')
    OR pg_has_role(session_user, 'pg_read_server_files', 'MEMBER'))
FROM pg_roles WHERE rolname = session_user"""
_ROLE_NEEDED = (
    "SQL of one's own isn't run here as a superuser of PostgreSQL, nor as a role that reaches the server's files: "
    "serve the page with a role that only reads (docs/postgresql-access.md has its GRANT); the questions below do run"
)
_FROM_GROUP = re.compile(r"\b(?:from|join)\s+group\b", re.IGNORECASE)
_OF_GROUPS = "; did you mean groups? GROUP is a word of SQL."
_UNKNOWN = re.compile(r'^no such (table|column): "?([\w.]+)|^(relation|column) "?([\w.]+)"? does not exist')
_COLUMNS = {
    "sqlite": """SELECT m.name, c.name, NOT c."notnull" AND NOT c.pk FROM sqlite_master AS m,
pragma_table_info(m.name) AS c WHERE m.type IN ('table', 'view') ORDER BY m.name, c.cid""",
    "postgresql": """SELECT table_name, column_name, is_nullable = 'YES' FROM information_schema.columns
WHERE table_schema = ANY (current_schemas(false)) ORDER BY table_name, ordinal_position""",
}


def run_statement(
    reader: Reader, statement: str, timeout: float, *, most: int | None = None, guarded: bool = False
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return unique names of the columns, and all rows or the first of them; no names when it returns no rows.

    Raises AccessError when it would write, LockedError after `timeout` seconds, QueryError when it is invalid: for an
    unknown table or column it lists what there is. With `guarded` for statements of somebody else than this process's
    user: raises AccessError where functions of the database could reach the server's files or programs.
    """

    def run(tx: ReadTransaction) -> tuple[list[str], list[tuple[Any, ...]]]:
        if guarded and tx.dialect_name == "postgresql" and tx.value(_REACHES_THE_SERVER):
            raise AccessError(_ROLE_NEEDED)
        names, rows = tx.table(statement) if most is None else tx.first_rows(statement, most)
        return _unique(names), rows

    try:
        return reader.read_any(run, timeout=timeout)
    except StorageError as error:
        _explain(error, statement, timeout, reader)
    except (sqlite3.Warning, sqlite3.ProgrammingError) as error:  # the latter in 3.11
        raise QueryError(str(error)) from error


def _explain(error: StorageError, statement: str, timeout: float, reader: Reader) -> NoReturn:
    """Raise the error that a database's error for a statement means here."""
    cause: BaseException = error
    while (inner := cause.__cause__) is not None:  # the driver's own exception
        cause = inner
    state = getattr(cause, "sqlstate", None)
    message = str(cause)
    writes = state in _WRITES or _WRITES_TO_VIEW.match(message) is not None
    if writes or "readonly database" in message or "too many attached databases" in message:
        instead = _INSTEAD.get(statement.lstrip()[:6].lower(), "")
        raise AccessError(
            f"statements only read here, and the database refused this one: {message}{instead}"
        ) from error
    if state == "57014":
        raise LockedError(f"stopped after {timeout:g} s; raise --timeout if that is too soon") from error
    if "multiple commands" in message or "one statement at a time" in message:
        raise QueryError("give one statement at a time") from error
    if "server expects" in message or "bindings" in message:
        raise QueryError(f"the statement has parameters, which can't be given here: {message}") from error
    if type(error) is StorageError:
        # The statement's fault: it needs no URL.
        raise QueryError(message + _what_there_is(message, statement, reader)) from error
    raise error


def _what_there_is(message: str, statement: str, reader: Reader) -> str:
    """Return the rest of the message for an unknown table or column: the nearest name, and the names there are."""
    match = _UNKNOWN.match(message)
    if match is None:
        return _OF_GROUPS if "syntax" in message and _FROM_GROUP.search(statement) else ""
    kind, name = match[1] or match[3], (match[2] or match[4]).rpartition(".")[2]
    columns: dict[str, list[str]] = {}
    for table, column in reader.read_any(read_columns):
        columns.setdefault(table, []).append(column)
    if kind != "column":
        people = [table for table in columns if not table.startswith(("rb_", "sqlite_"))] or list(columns)
        return _nearest(name, columns) + (f" There are {', '.join(people)}" if people else " There is no table")
    words = set(re.findall(r"\w+", statement.lower()))
    used = {table: names for table, names in columns.items() if table.lower() in words}
    has = "; ".join(f"{table} has {', '.join(names)}" for table, names in used.items())
    return _nearest(name, [one for names in used.values() for one in names]) + (f" {has}" if has else "")


def _nearest(name: str, names: Sequence[str] | Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else "."


def read_columns(tx: ReadTransaction) -> dict[tuple[str, str], bool]:
    """Return the columns of all tables and views, in order, and whether each may be NULL."""
    return {(table, column): bool(null) for table, column, null in tx.table(_COLUMNS[tx.dialect_name])[1]}


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names of columns, repeated ones with a number."""
    result: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in result:
            number += 1
            candidate = f"{name}_{number}"
        result.append(candidate)
    return result


class Question(NamedTuple):
    """A question in words (Markdown) under a topic, and its statement on each database."""

    topic: str
    text: str
    sqlite: str
    postgresql: str

    def on(self, dialect: str) -> str:
        """Return the statement for a kind of database."""
        return self.postgresql if dialect == "postgresql" else self.sqlite


def _questions(text: str) -> tuple[Question, ...]:
    """Return the questions of a text: below a topic, each is a line above its statement, or the two statements."""
    found, topic = [], ""
    for block in text.strip().split("\n\n"):
        if block.startswith("# "):
            topic = block.removeprefix("# ")
            continue
        words, _, statements = block.partition("\n")
        sqlite, _, postgresql = statements.partition("\n-- on PostgreSQL\n")
        found.append(Question(topic, words, sqlite, postgresql or sqlite))
    return tuple(found)


QUESTIONS = _questions("""
# What goes on

What is there, how stale is it, and how good?
SELECT task_name, status, count(*) AS groups, avg(staleness) AS staleness, avg(reward) AS reward
  FROM groups GROUP BY task_name, status ORDER BY task_name, status

Why does the trainer wait? (`replaybuf why` says more.)
SELECT worker, wants, reason FROM waiters ORDER BY since

Who has gone silent, for how many minutes?
SELECT worker, host, pid, CAST((julianday('now') - julianday(last_seen)) * 1440 AS INTEGER) AS minutes
  FROM workers WHERE ended_at IS NULL AND last_seen < datetime('now', '-2 minutes')
-- on PostgreSQL
SELECT worker, host, pid, CAST(floor(extract(epoch FROM now() - last_seen) / 60) AS int) AS minutes
  FROM workers WHERE ended_at IS NULL AND last_seen < now() - interval '2 minutes'

Tokens an hour:
SELECT worker, groups_last_hour AS groups, tokens_last_hour AS tokens, failures_last_hour AS failures
  FROM workers WHERE groups_last_hour > 0 ORDER BY worker

What failed, and why?
SELECT uid, worker, error FROM groups WHERE status = 'failed'

# Steps

The last steps, and what they were trained on:
SELECT step, worker, tasks, groups, reward, min_reward, max_staleness, oldest_model_step
  FROM batches ORDER BY id DESC LIMIT 10

Since step 413 the reward falls: who made what that step was trained on?
SELECT worker, count(*) AS groups, avg(reward) AS reward, max(staleness) AS stalest
  FROM batch_groups WHERE step = 413 GROUP BY worker ORDER BY reward

The three worst answers, whole, that it was trained on:
SELECT r.uid, r.worker, length(r.full_response) AS characters, substr(r.full_response, 1, 40) AS begins
  FROM batch_groups b JOIN rollouts r ON r.uid = b.uid
 WHERE b.step = 413 ORDER BY r.reward, r.uid, r.position LIMIT 3

Which steps had group 9?
SELECT step, taken_by, reward, staleness
  FROM batch_groups WHERE uid = 9 AND 9 BETWEEN first_uid AND last_uid

Was anything trained on twice? (A draw counts if all of it was consumed, and no restore undid it.)
WITH runs AS (
    SELECT buffer, restores, min(step) AS first_step
      FROM batches WHERE status = 'completed' AND settled > 0 GROUP BY buffer, restores)
SELECT m.uid, count(*) AS times FROM batches b JOIN batch_groups m ON m.batch = b.id
 WHERE b.status = 'completed' AND b.settled = b.groups AND NOT EXISTS (
    SELECT 1 FROM runs r WHERE r.buffer = b.buffer AND r.restores > b.restores
       AND coalesce(r.first_step <= b.step, TRUE))
 GROUP BY m.uid HAVING count(*) > 1 ORDER BY times DESC, m.uid

How many seconds do groups wait before they are drawn?
SELECT b.step, avg((julianday(b.taken_at) - julianday(m.created_at)) * 86400) AS seconds
  FROM batches b JOIN batch_groups m ON m.batch = b.id GROUP BY b.step ORDER BY b.step
-- on PostgreSQL
SELECT b.step, avg(extract(epoch FROM b.taken_at - m.created_at)) AS seconds
  FROM batches b JOIN batch_groups m ON m.batch = b.id GROUP BY b.step ORDER BY b.step

# Rewards

By part, of rewards that are dicts:
SELECT task_name, avg(rewards ->> '$.score') AS score, avg(rewards ->> '$.format') AS format
  FROM rollouts WHERE status = 'completed' GROUP BY task_name ORDER BY task_name
-- on PostgreSQL
SELECT task_name, avg((rewards ->> 'score')::float) AS score, avg((rewards ->> 'format')::float) AS format
  FROM rollouts WHERE status = 'completed' GROUP BY task_name ORDER BY task_name

By a tag:
SELECT tags ->> 'level' AS level, count(*) AS groups, avg(reward) AS reward
  FROM groups WHERE task_name = 'math' GROUP BY 1 ORDER BY 1

Groups in which all answers are worth the same, so that nothing is learned from them:
SELECT task_name, count(*) AS groups, sum(CASE WHEN lowest = highest THEN 1 ELSE 0 END) AS flat
  FROM (SELECT uid, task_name, min(reward) AS lowest, max(reward) AS highest
          FROM rollouts WHERE status = 'completed' GROUP BY uid, task_name) AS spread
 GROUP BY task_name ORDER BY task_name

Prompts that are seldom solved:
SELECT prompt, count(*) AS groups, avg(reward) AS reward
  FROM groups WHERE task_name = 'math' GROUP BY prompt HAVING avg(reward) < 0.5 ORDER BY reward, prompt

# Responses

How long are responses, and how many were cut off?
SELECT finish_reason, count(*) AS rollouts, avg(response_tokens) AS tokens, avg(reward) AS reward
  FROM rollouts GROUP BY finish_reason ORDER BY finish_reason

Who says a thing?
SELECT worker, count(*) AS rollouts FROM rollouts
 WHERE full_response LIKE '%I can''t say%' GROUP BY worker ORDER BY worker

What was the conversation before it?
SELECT m.value ->> '$.role' AS role, length(m.value ->> '$.content') AS characters
  FROM groups g, json_each(g.messages) m WHERE g.uid = 2 ORDER BY m.key
-- on PostgreSQL
SELECT m.value ->> 'role' AS role, length(m.value ->> 'content') AS characters
  FROM groups g, jsonb_array_elements(g.messages) WITH ORDINALITY m(value, key) WHERE g.uid = 2 ORDER BY m.key
""")
