"""Views of what was done, by whom and when (`records`), for people; in each database's own SQL, as in `views`."""

from __future__ import annotations

from collections.abc import Mapping

from replaybuf.storage.sql.schema.records import ACTIVITY_SECONDS


def _times(**columns: str) -> Mapping[str, Mapping[str, str]]:
    """Return for each dialect how these columns of seconds since the epoch become times."""
    return {
        "sqlite": {
            name: f"CAST(strftime('%Y-%m-%d %H:%M:%f', {column}, 'unixepoch') AS TEXT) AS {name}"
            for name, column in columns.items()
        },
        "postgresql": {name: f"to_timestamp({column}) AS {name}" for name, column in columns.items()},
    }


_NOW = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) AS double precision)",
}
_INTEGER = {"sqlite": "INTEGER", "postgresql": "bigint"}
_TASKS = {
    "sqlite": """
    CAST((SELECT group_concat(task_name || ':' || times, ' ') FROM (
        SELECT l.task_name AS task_name, count(1) AS times
          FROM json_each(b.members) m JOIN rb_lane l ON l.id = json_extract(m.value, '$[1]')
         GROUP BY l.task_name ORDER BY l.task_name)) AS TEXT)""",
    "postgresql": """
    (SELECT string_agg(t.task_name || ':' || t.times, ' ' ORDER BY t.task_name) FROM (
        SELECT l.task_name AS task_name, count(1) AS times
          FROM jsonb_array_elements(b.members) m(value) JOIN rb_lane l ON l.id = (m.value ->> 1)::int
         GROUP BY l.task_name) t)""",
}


def _batches(dialect: str) -> str:
    times = _times(taken_at="b.taken_at")[dialect]
    return f"""
CREATE VIEW batches AS
SELECT
    b.id AS id, b.buffer AS buffer, {times["taken_at"]}, b.step AS step, b.status AS status, b.worker AS worker,
    b.lease AS lease, {_TASKS[dialect]} AS tasks,
    b.groups AS groups, b.settled AS settled, b.reward AS reward, b.min_reward AS min_reward,
    b.max_reward AS max_reward, b.staleness AS staleness, b.max_staleness AS max_staleness,
    b.oldest_step AS oldest_model_step, b.newest_step AS newest_model_step, b.epoch AS restores,
    b.first_uid AS first_uid, b.last_uid AS last_uid
FROM rb_batch b
"""


_MEMBERS = {
    "sqlite": """
    CAST(json_extract(m.value, '$[0]') AS INTEGER) AS uid, l.task_name AS task_name,
    CAST(json_extract(m.value, '$[2]') AS TEXT) AS worker,
    CAST(json_extract(m.value, '$[3]') AS REAL) AS reward,
    CAST(json_extract(m.value, '$[4]') AS INTEGER) AS staleness,
    CAST(json_extract(m.value, '$[5]') AS INTEGER) AS oldest_model_step,
    CAST(strftime('%Y-%m-%d %H:%M:%f', json_extract(m.value, '$[6]'), 'unixepoch') AS TEXT) AS created_at,
    b.first_uid AS first_uid, b.last_uid AS last_uid
FROM rb_batch b, json_each(b.members) m LEFT JOIN rb_lane l ON l.id = json_extract(m.value, '$[1]')
""",
    "postgresql": """
    (m.value ->> 0)::bigint AS uid, l.task_name AS task_name, m.value ->> 2 AS worker,
    (m.value ->> 3)::double precision AS reward, (m.value ->> 4)::bigint AS staleness,
    (m.value ->> 5)::bigint AS oldest_model_step, to_timestamp((m.value ->> 6)::double precision) AS created_at,
    b.first_uid AS first_uid, b.last_uid AS last_uid
FROM rb_batch b CROSS JOIN LATERAL jsonb_array_elements(b.members) m(value)
    LEFT JOIN rb_lane l ON l.id = (m.value ->> 1)::int
""",
}


def _batch_groups(dialect: str) -> str:
    return f"""
CREATE VIEW batch_groups AS
SELECT b.id AS batch, b.buffer AS buffer, b.step AS step, b.worker AS taken_by, {_MEMBERS[dialect]}
"""


def _leases(dialect: str) -> str:
    times = _times(
        since="(SELECT min(b.taken_at) FROM rb_batch b WHERE b.lease = held.lease)", until="held.leased_until"
    )[dialect]
    return f"""
CREATE VIEW leases AS
SELECT
    held.lease AS lease, held.buffer AS buffer, held.task_name AS task_name, held.status AS status,
    held.holder AS worker, {times["since"]}, {times["until"]},
    CAST(held.groups AS {_INTEGER[dialect]}) AS groups, CAST(held.deliveries AS {_INTEGER[dialect]}) AS deliveries,
    CAST((SELECT max(b.step) FROM rb_batch b WHERE b.lease = held.lease) AS {_INTEGER[dialect]}) AS step
FROM (
    SELECT
        g.lease AS lease, l.buffer AS buffer, l.task_name AS task_name, l.status AS status, g.holder AS holder,
        min(g.leased_until) AS leased_until, count(1) AS groups, max(g.deliveries) AS deliveries
    FROM rb_group g JOIN rb_lane l ON l.id = g.lane
    WHERE g.leased_until IS NOT NULL
    GROUP BY g.lease, l.buffer, l.task_name, l.status, g.holder
) held
"""


def _checkpoints(dialect: str) -> str:
    times = _times(created_at="c.created_at")[dialect]
    return f"""
CREATE VIEW checkpoints AS
SELECT c.buffer AS buffer, c.step AS step, {times["created_at"]}, c.groups AS groups, c.bytes AS bytes
FROM rb_checkpoint c WHERE c.copied_to IS NULL
"""


def _waiters(dialect: str) -> str:
    times = _times(since="a.since", deadline="a.deadline", seen_at="a.seen_at")[dialect]
    return f"""
CREATE VIEW waiters AS
SELECT
    w.buffer AS buffer, w.name AS worker, w.host AS host, w.pid AS pid, a.kind AS kind, a.wants AS wants,
    a.status AS status, a.query AS query, {times["since"]}, {times["deadline"]}, {times["seen_at"]},
    a.reason AS reason, a.limits AS limits
FROM rb_waiter a JOIN rb_worker w ON w.id = a.worker_id
"""


def _workers(dialect: str) -> str:
    times = _times(started_at="w.started_at", last_seen="w.seen_at", ended_at="w.ended_at")[dialect]
    counts = ", ".join(
        f"CAST(coalesce(sum(a.{name}), 0) AS {_INTEGER[dialect]}) AS {name}_last_hour"
        for name in ("groups", "rollouts", "tokens", "failures", "taken")
    )
    return f"""
CREATE VIEW workers AS
SELECT
    w.buffer AS buffer, w.name AS worker, w.host AS host, w.pid AS pid,
    {times["started_at"]}, {times["last_seen"]}, {times["ended_at"]}, {counts}
FROM rb_worker w
    LEFT JOIN rb_activity a ON a.worker_id = w.id AND a.since > {_NOW[dialect]} - 3600 - {ACTIVITY_SECONDS}
GROUP BY w.id, w.buffer, w.name, w.host, w.pid, w.started_at, w.seen_at, w.ended_at
"""


def _events(dialect: str) -> str:
    times = _times(happened_at="e.happened_at")[dialect]
    return f"""
CREATE VIEW events AS
SELECT
    e.id AS id, e.buffer AS buffer, {times["happened_at"]}, e.kind AS kind, e.task_name AS task_name,
    e.worker AS worker, e.step AS step, e.groups AS groups, e.uids AS uids, e.detail AS detail
FROM rb_event e
"""


_MAKERS = {
    "batches": _batches,
    "batch_groups": _batch_groups,
    "leases": _leases,
    "checkpoints": _checkpoints,
    "waiters": _waiters,
    "workers": _workers,
    "events": _events,
}
#: The statements that create the views, by dialect and view.
RECORD_VIEWS = {
    dialect: {name: make(dialect) for name, make in _MAKERS.items()} for dialect in ("sqlite", "postgresql")
}
