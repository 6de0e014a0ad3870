"""The views for people: of groups and rollouts (`GROUP_VIEWS`), and of what was done (`RECORD_VIEWS`)."""

from __future__ import annotations

from replaybuf.rollouts.outline import PREVIEW_CHARS
from replaybuf.segments.extents import EXTENT_BYTES
from replaybuf.storage.sql.schema.records import ACTIVITY_SECONDS

_STALENESS = "CASE WHEN g.pinned_staleness IS NOT NULL THEN g.pinned_staleness ELSE l.step - g.oldest_step - 1 END"

# The step of one rollout's staleness: that of the refresh if there was one, else that of its put or expiry.
_ROLLOUT_STEP = "CASE WHEN g.pinned_staleness IS NULL THEN l.step ELSE g.pinned_step END"


# Whether the payload (p) is what was put, as far as its size tells. Where its arrays are kept apart, there is the head
# of it, with all texts, and their place behind it.
_IS_WHOLE = f"length(p.data) = g.bytes - coalesce(p.size - {EXTENT_BYTES}, 0)"


def _sqlite_text(preview: str, place: str, path: str) -> str:
    """Return a whole text: its preview if that is all of it, else what is at this place in the payload (p)."""
    return f"""CAST(CASE
      WHEN length({preview}) <= {PREVIEW_CHARS} THEN {preview}
      WHEN {_IS_WHOLE}
      THEN substr(p.data, json_extract({place}, '{path}[0]') + 1, json_extract({place}, '{path}[1]'))
      END AS TEXT)"""


def _postgres_text(preview: str, place: str) -> str:
    """Return a whole text: its preview if that is all of it, else what is at this place in the payload (p)."""
    return f"""CASE
      WHEN length({preview}) <= {PREVIEW_CHARS} THEN {preview}
      WHEN {_IS_WHOLE}
      THEN convert_from(substr(p.data, ({place} ->> 0)::int + 1, ({place} ->> 1)::int), 'UTF8')
      END"""


_SQLITE_GROUPS = f"""
CREATE VIEW groups AS
SELECT
    g.uid AS uid,
    g.uid AS timestamp_id,
    l.buffer AS buffer,
    l.task_name AS task_name,
    l.status AS status,
    CAST({_STALENESS} AS INTEGER) AS staleness,
    g.priority AS priority,
    g.times_sampled AS times_sampled,
    CAST(strftime('%Y-%m-%d %H:%M:%f', g.created_at, 'unixepoch') AS TEXT) AS created_at,
    CAST(strftime('%Y-%m-%d %H:%M:%f', g.leased_until, 'unixepoch') AS TEXT) AS leased_until,
    CAST(strftime('%Y-%m-%d %H:%M:%f', g.archived_at, 'unixepoch') AS TEXT) AS archived_at,
    g.deliveries AS deliveries,
    g.reward AS reward,
    CAST(json_array_length(g.marks, '$.oldest') AS INTEGER) AS rollouts,
    CAST((SELECT sum(json_extract(r.value, '$.prompt_tokens')) FROM json_each(p.outline) r) AS INTEGER)
      AS prompt_tokens,
    CAST((SELECT coalesce(sum(json_extract(r.value, '$.response_tokens')), 0) FROM json_each(p.outline) r
      WHERE coalesce(json_extract(g.marks, '$.expired[' || r.key || ']'), 0) = 0) AS INTEGER)
      AS response_tokens,
    CAST((SELECT group_concat(reason || ':' || times, ' ') FROM (
        SELECT json_extract(r.value, '$.finish_reason') AS reason, count(1) AS times FROM json_each(p.outline) r
         WHERE coalesce(json_extract(g.marks, '$.expired[' || r.key || ']'), 0) = 0
           AND json_extract(r.value, '$.finish_reason') IS NOT NULL
         GROUP BY reason ORDER BY reason)) AS TEXT) AS finish_reasons,
    p.prompt AS prompt,
    CAST(CASE WHEN coalesce(json_extract(g.marks, '$.expired[0]'), 0) THEN ''
              ELSE json_extract(p.outline, '$[0].response') END AS TEXT) AS response,
    g.tags AS tags,
    CAST(json_extract(g.scoped_key, '$[1]') AS TEXT) AS key,
    CAST(CASE WHEN g.error IS NULL AND l.status = 'failed' THEN
      (SELECT json_extract(r.value, '$.error_msg') FROM json_each(p.outline) r
        WHERE json_extract(r.value, '$.error_msg') IS NOT NULL ORDER BY r.key LIMIT 1)
      ELSE g.error END AS TEXT) AS error,
    g.bytes AS bytes,
    g.worker AS worker,
    g.put_step AS put_step,
    g.holder AS leased_by,
    g.trained_step AS trained_step,
    {_sqlite_text("p.prompt", "p.outline", "$[0].prompt_at")} AS full_prompt,
    CAST(CASE WHEN json_type(p.outline, '$[0].messages') IS NOT NULL AND {_IS_WHOLE} THEN
      (SELECT json_group_array(json_object('role', json_extract(m.value, '$[0]'), 'content', CAST(
          substr(p.data, json_extract(m.value, '$[1]') + 1, json_extract(m.value, '$[2]')) AS TEXT)))
         FROM json_each(p.outline, '$[0].messages') m)
      END AS TEXT) AS messages
FROM rb_group g JOIN rb_lane l ON l.id = g.lane LEFT JOIN rb_payload p ON p.uid = g.uid
"""

_SQLITE_ROLLOUTS = f"""
CREATE VIEW rollouts AS
SELECT
    r.uid AS uid,
    CAST(r.position AS INTEGER) AS position,
    r.buffer AS buffer,
    r.task_name AS task_name,
    CAST(json_extract(r.outline, '$.id') AS TEXT) AS rollout_id,
    CAST(CASE WHEN r.expired THEN 'expired' ELSE json_extract(r.outline, '$.status') END AS TEXT) AS status,
    CAST(CASE WHEN r.step IS NOT NULL THEN coalesce(r.step - r.oldest_step - 1, 0)
              ELSE coalesce(r.staleness, json_extract(r.outline, '$.staleness')) END AS INTEGER) AS staleness,
    CAST(r.oldest_step AS INTEGER) AS oldest_model_step,
    CAST(r.reward AS REAL) AS reward,
    CAST(CASE WHEN r.expired THEN NULL ELSE json_extract(r.outline, '$.rewards') END AS TEXT) AS rewards,
    CAST(json_extract(r.outline, '$.prompt_tokens') AS INTEGER) AS prompt_tokens,
    CAST(CASE WHEN r.expired THEN 0 ELSE json_extract(r.outline, '$.response_tokens') END AS INTEGER)
      AS response_tokens,
    CAST(CASE WHEN r.expired THEN NULL ELSE json_extract(r.outline, '$.finish_reason') END AS TEXT) AS finish_reason,
    r.prompt AS prompt,
    CAST(CASE WHEN r.expired THEN '' ELSE json_extract(r.outline, '$.response') END AS TEXT) AS response,
    CAST(CASE WHEN r.expired THEN NULL ELSE json_extract(r.outline, '$.error_msg') END AS TEXT) AS error_msg,
    CAST(CASE WHEN r.expired THEN NULL ELSE r.full_response END AS TEXT) AS full_response,
    r.worker AS worker
FROM (
    SELECT
        g.uid AS uid, o.key AS position, o.value AS outline, l.buffer AS buffer, l.task_name AS task_name,
        p.prompt AS prompt, g.worker AS worker,
        {_ROLLOUT_STEP} AS step,
        json_extract(g.marks, '$.oldest[' || o.key || ']') AS oldest_step,
        json_extract(g.marks, '$.reward[' || o.key || ']') AS reward,
        json_extract(g.marks, '$.staleness[' || o.key || ']') AS staleness,
        coalesce(json_extract(g.marks, '$.expired[' || o.key || ']'), 0) AS expired,
        {_sqlite_text("json_extract(o.value, '$.response')", "o.value", "$.response_at")} AS full_response
    FROM rb_group g JOIN rb_lane l ON l.id = g.lane JOIN rb_payload p ON p.uid = g.uid, json_each(p.outline) o
) r
"""

_POSTGRES_GROUPS = f"""
CREATE VIEW groups AS
SELECT
    g.uid AS uid,
    g.uid AS timestamp_id,
    l.buffer AS buffer,
    l.task_name AS task_name,
    l.status AS status,
    {_STALENESS} AS staleness,
    g.priority AS priority,
    g.times_sampled AS times_sampled,
    to_timestamp(g.created_at) AS created_at,
    to_timestamp(g.leased_until) AS leased_until,
    to_timestamp(g.archived_at) AS archived_at,
    g.deliveries AS deliveries,
    g.reward AS reward,
    jsonb_array_length(g.marks -> 'oldest') AS rollouts,
    (SELECT sum((r.value ->> 'prompt_tokens')::bigint)::bigint
       FROM jsonb_array_elements(p.outline) r(value)) AS prompt_tokens,
    (SELECT coalesce(sum((r.value ->> 'response_tokens')::bigint), 0)::bigint
       FROM jsonb_array_elements(p.outline) WITH ORDINALITY r(value, place)
      WHERE NOT coalesce((g.marks -> 'expired' ->> (r.place - 1)::int)::boolean, false)) AS response_tokens,
    (SELECT string_agg(f.reason || ':' || f.times, ' ' ORDER BY f.reason) FROM (
        SELECT r.value ->> 'finish_reason' AS reason, count(1) AS times
          FROM jsonb_array_elements(p.outline) WITH ORDINALITY r(value, place)
         WHERE NOT coalesce((g.marks -> 'expired' ->> (r.place - 1)::int)::boolean, false)
           AND r.value ->> 'finish_reason' IS NOT NULL
         GROUP BY r.value ->> 'finish_reason') f) AS finish_reasons,
    p.prompt AS prompt,
    CASE WHEN coalesce((g.marks -> 'expired' ->> 0)::boolean, false) THEN ''
         ELSE p.outline -> 0 ->> 'response' END AS response,
    g.tags AS tags,
    g.scoped_key::jsonb ->> 1 AS key,
    CASE WHEN g.error IS NULL AND l.status = 'failed' THEN
      (SELECT r.value ->> 'error_msg' FROM jsonb_array_elements(p.outline) WITH ORDINALITY r(value, place)
        WHERE r.value ->> 'error_msg' IS NOT NULL ORDER BY r.place LIMIT 1)
      ELSE g.error END AS error,
    g.bytes AS bytes,
    g.worker AS worker,
    g.put_step AS put_step,
    g.holder AS leased_by,
    g.trained_step AS trained_step,
    {_postgres_text("p.prompt", "(p.outline -> 0 -> 'prompt_at')")} AS full_prompt,
    CASE WHEN p.outline -> 0 -> 'messages' IS NOT NULL AND {_IS_WHOLE} THEN
      (SELECT jsonb_agg(jsonb_build_object('role', m.value ->> 0, 'content', convert_from(
          substr(p.data, (m.value ->> 1)::int + 1, (m.value ->> 2)::int), 'UTF8')) ORDER BY m.place)
         FROM jsonb_array_elements(p.outline -> 0 -> 'messages') WITH ORDINALITY m(value, place))
      END AS messages
FROM rb_group g JOIN rb_lane l ON l.id = g.lane LEFT JOIN rb_payload p ON p.uid = g.uid
"""

_POSTGRES_ROLLOUTS = f"""
CREATE VIEW rollouts AS
SELECT
    r.uid AS uid,
    r.position AS position,
    r.buffer AS buffer,
    r.task_name AS task_name,
    r.outline ->> 'id' AS rollout_id,
    CASE WHEN r.expired THEN 'expired' ELSE r.outline ->> 'status' END AS status,
    CASE WHEN r.step IS NOT NULL THEN coalesce(r.step - r.oldest_step - 1, 0)
         ELSE coalesce(r.staleness, (r.outline ->> 'staleness')::bigint) END AS staleness,
    r.oldest_step AS oldest_model_step,
    r.reward AS reward,
    CASE WHEN r.expired THEN NULL ELSE r.outline -> 'rewards' END AS rewards,
    (r.outline ->> 'prompt_tokens')::bigint AS prompt_tokens,
    CASE WHEN r.expired THEN 0 ELSE (r.outline ->> 'response_tokens')::bigint END AS response_tokens,
    CASE WHEN r.expired THEN NULL ELSE r.outline ->> 'finish_reason' END AS finish_reason,
    r.prompt AS prompt,
    CASE WHEN r.expired THEN '' ELSE r.outline ->> 'response' END AS response,
    CASE WHEN r.expired THEN NULL ELSE r.outline ->> 'error_msg' END AS error_msg,
    CASE WHEN r.expired THEN NULL ELSE r.full_response END AS full_response,
    r.worker AS worker
FROM (
    SELECT
        g.uid AS uid, (o.place - 1)::int AS position, o.value AS outline, l.buffer AS buffer, l.task_name AS task_name,
        p.prompt AS prompt, g.worker AS worker,
        {_ROLLOUT_STEP} AS step,
        (g.marks -> 'oldest' ->> (o.place - 1)::int)::bigint AS oldest_step,
        (g.marks -> 'reward' ->> (o.place - 1)::int)::double precision AS reward,
        (g.marks -> 'staleness' ->> (o.place - 1)::int)::bigint AS staleness,
        coalesce((g.marks -> 'expired' ->> (o.place - 1)::int)::boolean, false) AS expired,
        {_postgres_text("(o.value ->> 'response')", "(o.value -> 'response_at')")} AS full_response
    FROM rb_group g JOIN rb_lane l ON l.id = g.lane JOIN rb_payload p ON p.uid = g.uid
    CROSS JOIN LATERAL jsonb_array_elements(p.outline) WITH ORDINALITY o(value, place)
) r
"""

#: The statements that create the views, by dialect and view.
GROUP_VIEWS = {
    "sqlite": {"groups": _SQLITE_GROUPS, "rollouts": _SQLITE_ROLLOUTS},
    "postgresql": {"groups": _POSTGRES_GROUPS, "rollouts": _POSTGRES_ROLLOUTS},
}


_NOW = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) AS double precision)",
}
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


def _record_views(dialect: str) -> dict[str, str]:
    """Return the queries of the views of what was done, by name."""

    def time(seconds: str) -> str:
        if dialect == "postgresql":
            return f"to_timestamp({seconds})"
        return f"CAST(strftime('%Y-%m-%d %H:%M:%f', {seconds}, 'unixepoch') AS TEXT)"

    def whole(number: str) -> str:
        return f"CAST({number} AS {'INTEGER' if dialect == 'sqlite' else 'bigint'})"

    counts = ", ".join(
        f"{whole(f'coalesce(sum(a.{name}), 0)')} AS {name}_last_hour"
        for name in ("groups", "rollouts", "tokens", "failures", "taken")
    )
    return {
        "batches": f"""
SELECT
    b.id AS id, b.buffer AS buffer, {time("b.taken_at")} AS taken_at, b.step AS step, b.status AS status,
    b.worker AS worker, b.lease AS lease, {_TASKS[dialect]} AS tasks,
    b.groups AS groups, b.settled AS settled, b.reward AS reward, b.min_reward AS min_reward,
    b.max_reward AS max_reward, b.staleness AS staleness, b.max_staleness AS max_staleness,
    b.oldest_step AS oldest_model_step, b.newest_step AS newest_model_step, b.epoch AS restores,
    b.first_uid AS first_uid, b.last_uid AS last_uid
FROM rb_batch b
""",
        "batch_groups": f"""
SELECT b.id AS batch, b.buffer AS buffer, b.step AS step, b.worker AS taken_by, {_MEMBERS[dialect]}
""",
        "leases": f"""
SELECT
    held.lease AS lease, held.buffer AS buffer, held.task_name AS task_name, held.status AS status,
    held.holder AS worker, {time("(SELECT min(b.taken_at) FROM rb_batch b WHERE b.lease = held.lease)")} AS since,
    {time("held.leased_until")} AS until,
    {whole("held.groups")} AS groups, {whole("held.deliveries")} AS deliveries,
    {whole("(SELECT max(b.step) FROM rb_batch b WHERE b.lease = held.lease)")} AS step
FROM (
    SELECT
        g.lease AS lease, l.buffer AS buffer, l.task_name AS task_name, l.status AS status, g.holder AS holder,
        min(g.leased_until) AS leased_until, count(1) AS groups, max(g.deliveries) AS deliveries
    FROM rb_group g JOIN rb_lane l ON l.id = g.lane
    WHERE g.leased_until IS NOT NULL
    GROUP BY g.lease, l.buffer, l.task_name, l.status, g.holder
) held
""",
        "checkpoints": f"""
SELECT c.buffer AS buffer, c.step AS step, {time("c.created_at")} AS created_at, c.groups AS groups, c.bytes AS bytes
FROM rb_checkpoint c WHERE c.copied_to IS NULL
""",
        "waiters": f"""
SELECT
    w.buffer AS buffer, w.name AS worker, w.host AS host, w.pid AS pid, a.kind AS kind, a.wants AS wants,
    a.status AS status, a.query AS query, {time("a.since")} AS since,
    {time("a.deadline")} AS deadline, {time("a.seen_at")} AS seen_at,
    a.reason AS reason, a.limits AS limits
FROM rb_waiter a JOIN rb_worker w ON w.id = a.worker_id
""",
        "workers": f"""
SELECT
    w.buffer AS buffer, w.name AS worker, w.host AS host, w.pid AS pid,
    {time("w.started_at")} AS started_at, {time("w.seen_at")} AS last_seen, {time("w.ended_at")} AS ended_at, {counts}
FROM rb_worker w
    LEFT JOIN rb_activity a ON a.worker_id = w.id AND a.since > {_NOW[dialect]} - 3600 - {ACTIVITY_SECONDS}
GROUP BY w.id, w.buffer, w.name, w.host, w.pid, w.started_at, w.seen_at, w.ended_at
""",
        "events": f"""
SELECT
    e.id AS id, e.buffer AS buffer, {time("e.happened_at")} AS happened_at, e.kind AS kind, e.task_name AS task_name,
    e.worker AS worker, e.step AS step, e.groups AS groups, e.uids AS uids, e.detail AS detail
FROM rb_event e
""",
        # What is in an open segment is counted when it is sealed.
        "places": f"""
SELECT
    s.url AS url, count(s.id) AS segments, count(s.id) - count(s.size) AS open_segments,
    {whole("coalesce(sum(coalesce(s.size, s.written)), 0)")} AS bytes,
    {whole("coalesce(sum(coalesce(s.written, s.live)), 0)")} AS live_bytes,
    {whole("coalesce(sum(s.size - s.live), 0)")} AS dead_bytes
FROM (
    SELECT
        p.id AS place, p.url AS url, s.id AS id, s.size AS size, s.live AS live,
        CASE WHEN s.size IS NULL
        THEN (SELECT coalesce(sum(y.size), 0) FROM rb_payload y WHERE y.segment = s.id) END AS written
    FROM rb_place p LEFT JOIN rb_segment s ON s.place = p.id
) s
GROUP BY s.place, s.url
""",
    }


#: The statements that create the views, by dialect and view.
RECORD_VIEWS = {
    dialect: {name: f"\nCREATE VIEW {name} AS{query}" for name, query in _record_views(dialect).items()}
    for dialect in ("sqlite", "postgresql")
}


#: The statements that create the views, by dialect and view.
CREATE_VIEWS = {dialect: GROUP_VIEWS[dialect] | RECORD_VIEWS[dialect] for dialect in ("sqlite", "postgresql")}
VIEWS = tuple(CREATE_VIEWS["sqlite"])
