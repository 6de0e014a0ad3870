"""Views for people: groups and rollouts, and the history of a run. Each is written once, for both databases."""

from __future__ import annotations

from dataclasses import dataclass

from replaybuf.storage.places.store import EXTENT_BYTES
from replaybuf.storage.reports import ACTIVITIES
from replaybuf.storage.sql.schema import REFRESHED_TO, STALENESS
from replaybuf.storage.sql.schema.tables import ACTIVITY_SECONDS
from replaybuf.values.rollouts.outline import PREVIEW_CHARS

# Whether the payload (p) has the size that was put. If its arrays are kept apart, `data` is its head with all texts,
# followed by the extent.
_IS_WHOLE = f"length(p.data) = g.bytes - coalesce(p.size - {EXTENT_BYTES}, 0)"


# The columns in a row of an annotation, with types of both databases.
_ANNOTATION_COLUMNS = "position int, value float8, text text, min_value float8, max_value float8, tokens int"


@dataclass(frozen=True, slots=True)
class _Sql:
    """SQL fragments that differ between the two databases."""

    dialect: str

    def either(self, sqlite: str, postgresql: str) -> str:
        return sqlite if self.dialect == "sqlite" else postgresql

    def typed(self, value: str, kind: str = "TEXT") -> str:
        """Return a value with a column type, which SQLite derives from a CAST."""
        return self.either(f"CAST({value} AS {kind})", value)

    def whole(self, number: str) -> str:
        return f"CAST({number} AS {self.either('INTEGER', 'bigint')})"

    def time(self, seconds: str) -> str:
        sqlite = f"CAST(strftime('%Y-%m-%d %H:%M:%f', {seconds}, 'unixepoch') AS TEXT)"
        return self.either(sqlite, f"to_timestamp({seconds})")

    def text(self, column: str, name: str) -> str:
        """Return a text value of a JSON column."""
        return self.either(f"json_extract({column}, '$.{name}')", f"{column} ->> '{name}'")

    def number(self, column: str, name: str) -> str:
        return self.either(self.text(column, name), f"({self.text(column, name)})::bigint")

    def mark(self, name: str, at: str, kind: str) -> str:
        """Return metadata (`rollouts.marks`) of the rollout at an index in its group (g)."""
        return self.either(
            f"json_extract(g.marks, '$.{name}[' || {at} || ']')", f"(g.marks -> '{name}' ->> {at})::{kind}"
        )

    def counted(self, name: str, value: str, source: str) -> str:
        """Return a text such as `a:2 b:1` with the distinct values in a source's rows and their counts."""
        query = f"SELECT {value} AS {name}, count(1) AS times FROM {source} GROUP BY {name}"
        listed = f"f.{name} || ':' || f.times, ' '"
        return self.typed(
            self.either(
                f"(SELECT group_concat({listed}) FROM ({query} ORDER BY {name}) f)",
                f"(SELECT string_agg({listed} ORDER BY f.{name}) FROM ({query}) f)",
            )
        )

    def expired(self, at: str) -> str:
        return f"coalesce({self.mark('expired', at, 'boolean')}, {self.either('0', 'false')})"

    def full_text(self, preview: str, sqlite: tuple[str, str], postgresql: str) -> str:
        """Return a whole text: its preview if not truncated, else the range at this place in the payload (p)."""
        column, path = sqlite
        start, size = (
            self.either(f"json_extract({column}, '{path}[{n}]')", f"({postgresql} ->> {n})::int") for n in (0, 1)
        )
        piece = f"substr(p.data, {start} + 1, {size})"
        return self.typed(f"""CASE
      WHEN length({preview}) <= {PREVIEW_CHARS} THEN {preview}
      WHEN {_IS_WHOLE}
      THEN {self.either(piece, f"convert_from({piece}, 'UTF8')")}
      END""")


def _group_views(sql: _Sql) -> dict[str, str]:
    """Return the queries of the views of groups and rollouts, by name."""
    rollouts = sql.either("json_each(p.outline) r", "jsonb_array_elements(p.outline) WITH ORDINALITY r(value, place)")
    not_expired = f"WHERE NOT {sql.expired(sql.either('r.key', '(r.place - 1)::int'))}"
    reason, error = sql.text("r.value", "finish_reason"), sql.text("r.value", "error_msg")
    finish_reasons = sql.counted("reason", reason, f"{rollouts} {not_expired} AND {reason} IS NOT NULL")
    messages = sql.either(
        f"""CASE WHEN json_type(p.outline, '$[0].messages') IS NOT NULL AND {_IS_WHOLE} THEN
      (SELECT json_group_array(json_object('role', json_extract(m.value, '$[0]'), 'content', CAST(
          substr(p.data, json_extract(m.value, '$[1]') + 1, json_extract(m.value, '$[2]')) AS TEXT)))
         FROM json_each(p.outline, '$[0].messages') m) END""",
        f"""CASE WHEN p.outline -> 0 -> 'messages' IS NOT NULL AND {_IS_WHOLE} THEN
      (SELECT jsonb_agg(jsonb_build_object('role', m.value ->> 0, 'content', convert_from(
          substr(p.data, (m.value ->> 1)::int + 1, (m.value ->> 2)::int), 'UTF8')) ORDER BY m.place)
         FROM jsonb_array_elements(p.outline -> 0 -> 'messages') WITH ORDINALITY m(value, place)) END""",
    )
    full_prompt = sql.full_text("p.prompt", ("p.outline", "$[0].prompt_at"), "(p.outline -> 0 -> 'prompt_at')")
    full_response = sql.full_text(
        sql.either("json_extract(o.value, '$.response')", "(o.value ->> 'response')"),
        ("o.value", "$.response_at"),
        "(o.value -> 'response_at')",
    )
    first_response = sql.either("json_extract(p.outline, '$[0].response')", "p.outline -> 0 ->> 'response'")
    order, at = sql.either("r.key", "r.place"), sql.either("o.key", "(o.place - 1)::int")

    rollout_join = sql.either(
        ", json_each(p.outline) o",
        "\n    CROSS JOIN LATERAL jsonb_array_elements(p.outline) WITH ORDINALITY o(value, place)",
    )
    error = f"""CASE WHEN g.error IS NULL AND l.status = 'failed' THEN
      (SELECT {error} FROM {rollouts} WHERE {error} IS NOT NULL ORDER BY {order} LIMIT 1)
      ELSE g.error END"""
    rollout_count = sql.either(
        "(SELECT max(s.value) + 1 FROM json_each(g.marks, '$.rollouts') s), json_array_length(g.marks, '$.oldest')",
        "(SELECT max(s::int) + 1 FROM jsonb_array_elements_text(g.marks -> 'rollouts') s), "
        "jsonb_array_length(g.marks -> 'oldest')",
    )
    staleness = f"""CASE WHEN r.step IS NOT NULL THEN coalesce(r.step - r.oldest_step - 1, 0)
      ELSE coalesce(r.staleness, {sql.number("r.outline", "staleness")}) END"""

    def of_part(place: int) -> str:
        """Return a number of the key of a rollout of a group that fills (`rows.part_key`)."""
        return sql.either(
            f"CAST(json_extract(g.scoped_key, '$[{place}]') AS INTEGER)", f"(g.scoped_key::jsonb ->> {place})::bigint"
        )

    def unless_expired(value: str, otherwise: str = "NULL") -> str:
        return sql.typed(f"CASE WHEN r.expired THEN {otherwise} ELSE {value} END")

    return {
        "groups": f"""
SELECT
    g.uid AS uid, g.uid AS timestamp_id, l.buffer AS buffer, l.task_name AS task_name, l.status AS status,
    {sql.typed(STALENESS, "INTEGER")} AS staleness, g.priority AS priority, g.times_sampled AS times_sampled,
    {sql.time("g.created_at")} AS created_at,
    {sql.time("g.leased_until")} AS leased_until,
    {sql.time("g.archived_at")} AS archived_at,
    g.deliveries AS deliveries, g.reward AS reward,
    {sql.typed(f"coalesce({rollout_count})", "INTEGER")} AS rollouts,
    {sql.whole(f"(SELECT sum({sql.number('r.value', 'prompt_tokens')}) FROM {rollouts})")} AS prompt_tokens,
    {sql.whole(f"(SELECT coalesce(sum({sql.number('r.value', 'response_tokens')}), 0) FROM {rollouts} {not_expired})")}
      AS response_tokens,
    {finish_reasons} AS finish_reasons,
    p.prompt AS prompt,
    {sql.typed(f"CASE WHEN {sql.expired('0')} THEN '' ELSE {first_response} END")} AS response,
    g.tags AS tags,
    {sql.either("CAST(json_extract(g.scoped_key, '$[1]') AS TEXT)", "g.scoped_key::jsonb ->> 1")} AS key,
    {of_part(3)} AS group_size, {of_part(5)} AS group_index,
    {sql.typed(error)} AS error,
    g.bytes AS bytes, g.worker AS worker, g.put_step AS put_step, g.holder AS leased_by, g.trained_step AS trained_step,
    {full_prompt} AS full_prompt,
    {sql.typed(messages)} AS messages
FROM rb_group g JOIN rb_lane l ON l.id = g.lane LEFT JOIN rb_payload p ON p.uid = g.uid
""",
        "rollouts": f"""
SELECT
    r.uid AS uid, {sql.typed("r.position", "INTEGER")} AS position, r.buffer AS buffer, r.task_name AS task_name,
    {sql.typed(sql.text("r.outline", "id"))} AS rollout_id,
    {unless_expired(sql.text("r.outline", "status"), "'expired'")} AS status,
    {sql.typed(staleness, "INTEGER")} AS staleness,
    {sql.typed("r.oldest_step", "INTEGER")} AS oldest_model_step,
    {sql.typed("r.reward", "REAL")} AS reward,
    {unless_expired(sql.either("json_extract(r.outline, '$.rewards')", "r.outline -> 'rewards'"))} AS rewards,
    {sql.typed(sql.number("r.outline", "prompt_tokens"), "INTEGER")} AS prompt_tokens,
    {sql.typed(f"CASE WHEN r.expired THEN 0 ELSE {sql.number('r.outline', 'response_tokens')} END", "INTEGER")}
      AS response_tokens,
    {unless_expired(sql.text("r.outline", "finish_reason"))} AS finish_reason,
    r.prompt AS prompt,
    {unless_expired(sql.text("r.outline", "response"), "''")} AS response,
    {unless_expired(sql.text("r.outline", "error_msg"))} AS error_msg,
    {unless_expired("r.full_response")} AS full_response,
    r.worker AS worker,
    {sql.typed("coalesce(r.rollout, r.position)", "INTEGER")} AS rollout, {sql.typed("r.parent", "INTEGER")} AS parent
FROM (
    SELECT
        g.uid AS uid, {at} AS position, o.value AS outline, l.buffer AS buffer, l.task_name AS task_name,
        p.prompt AS prompt, g.worker AS worker, {REFRESHED_TO} AS step,
        {sql.mark("oldest", at, "bigint")} AS oldest_step,
        {sql.mark("reward", at, "double precision")} AS reward,
        {sql.mark("staleness", at, "bigint")} AS staleness,
        {sql.mark("rollouts", at, "int")} AS rollout, {sql.mark("parents", at, "int")} AS parent,
        {sql.expired(at)} AS expired,
        {full_response} AS full_response
    FROM rb_group g JOIN rb_lane l ON l.id = g.lane JOIN rb_payload p ON p.uid = g.uid{rollout_join}
) r
""",
    }


def _record_views(sql: _Sql) -> dict[str, str]:
    """Return the queries of the views of a run's history, by name."""
    time, whole = sql.time, sql.whole
    now = sql.either(
        "(julianday('now') - 2440587.5) * 86400.0",
        "CAST(extract(epoch FROM clock_timestamp()) AS double precision)",
    )
    drawn = "rb_past p JOIN rb_lane l ON l.id = p.lane WHERE p.draw = b.id AND p.draw > 0"
    tasks = sql.counted("task_name", "l.task_name", drawn)
    # The counts of now, less those of the last period that is more than an hour ago.
    marks = sql.either("json_each(w.activity, '$.marks') m", "jsonb_each(w.activity -> 'marks') m")
    older = f"FROM {marks} WHERE {whole('m.key')} <= {now} - 3600 - {ACTIVITY_SECONDS}"
    counted = {
        name: sql.either(f"json_extract(m.value, '$[{place}]')", f"(m.value ->> {place})::bigint")
        for place, name in enumerate(ACTIVITIES)
    }
    sums = {
        name: whole(f"{sql.number('w.activity', name)} - coalesce((SELECT max({mark}) {older}), 0)")
        for name, mark in counted.items()
    }
    counts = ", ".join(f"{value} AS {name}_last_hour" for name, value in sums.items())
    waits = sql.either("rb_worker w, json_each(w.waits) a", "rb_worker w, jsonb_array_elements(w.waits) a(value)")

    def of_wait(name: str) -> str:
        return sql.text("a.value", name)

    def time_of_wait(name: str) -> str:
        return time(sql.either(of_wait(name), f"({of_wait(name)})::double precision"))

    annotation_columns = ", ".join(
        f"""{sql.typed(sql.either(f"json_extract(r.value, '$[{n}]')", f"(r.value ->> {n})::{kind}"), kind)} AS {name}"""
        for n, (name, kind) in enumerate(definition.split() for definition in _ANNOTATION_COLUMNS.split(", "))
    )
    wants, limits = (sql.either(of_wait(name), f"a.value -> '{name}'") for name in ("wants", "limits"))
    return {
        "batches": f"""
SELECT
    b.id AS id, b.buffer AS buffer, {time("b.taken_at")} AS taken_at, b.step AS step, b.status AS status,
    b.worker AS worker, b.lease AS lease, {tasks} AS tasks,
    b.groups AS groups, b.settled AS settled, b.reward AS reward, b.min_reward AS min_reward,
    b.max_reward AS max_reward, b.staleness AS staleness, b.max_staleness AS max_staleness,
    b.oldest_step AS oldest_model_step, b.newest_step AS newest_model_step, b.epoch AS restores,
    b.first_uid AS first_uid, b.last_uid AS last_uid
FROM rb_batch b
""",
        "batch_groups": f"""
SELECT b.id AS batch, b.buffer AS buffer, b.step AS step, b.worker AS taken_by,
    p.uid AS uid, l.task_name AS task_name, p.worker AS worker, p.reward AS reward, p.staleness AS staleness,
    p.oldest_step AS oldest_model_step, {time("p.created_at")} AS created_at,
    b.first_uid AS first_uid, b.last_uid AS last_uid
FROM rb_batch b JOIN rb_past p ON p.draw = b.id AND p.draw > 0 LEFT JOIN rb_lane l ON l.id = p.lane
""",
        "annotations": f"""
SELECT
    b.id AS batch, b.buffer AS buffer, b.step AS step, b.epoch AS restores, p.uid AS uid, l.task_name AS task_name,
    p.worker AS worker, a.name AS name, {annotation_columns}
FROM rb_annotation a JOIN rb_batch b ON b.id = a.draw JOIN rb_past p ON p.uid = a.uid AND p.draw = a.draw AND p.draw > 0
    LEFT JOIN rb_lane l ON l.id = p.lane
    CROSS JOIN {sql.either("json_each(a.rows) r", "jsonb_array_elements(a.rows) r(value)")}
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
FROM rb_checkpoint c
""",
        "waiters": f"""
SELECT
    w.buffer AS buffer, w.name AS worker, w.host AS host, w.pid AS pid, {sql.typed(of_wait("kind"))} AS kind,
    {wants} AS wants, {sql.typed(of_wait("status"))} AS status, {sql.typed(of_wait("query"))} AS query,
    {time_of_wait("since")} AS since, {time_of_wait("deadline")} AS deadline, {time("w.seen_at")} AS seen_at,
    {sql.typed(of_wait("reason"))} AS reason, {limits} AS limits
FROM {waits}
""",
        "workers": f"""
SELECT
    w.buffer AS buffer, w.name AS worker, w.host AS host, w.pid AS pid,
    {time("w.started_at")} AS started_at, {time("w.seen_at")} AS last_seen, {time("w.ended_at")} AS ended_at, {counts}
FROM rb_worker w
""",
        "events": f"""
SELECT
    e.id AS id, e.buffer AS buffer, {time("e.happened_at")} AS happened_at, e.kind AS kind, e.task_name AS task_name,
    e.worker AS worker, e.step AS step, e.groups AS groups, e.uids AS uids, e.detail AS detail
FROM rb_event e
""",
        "places": f"""
SELECT
    p.url AS url, count(f.id) AS files, {whole("coalesce(sum(f.groups), 0)")} AS groups,
    {whole("coalesce(sum(f.bytes), 0)")} AS bytes
FROM rb_place p LEFT JOIN rb_file f ON f.place = p.id AND f.groups >= 0
GROUP BY p.id, p.url
""",
    }


#: The CREATE VIEW statements, by dialect and view.
CREATE_VIEWS = {
    sql.dialect: {
        name: f"\nCREATE VIEW {name} AS{query}" for name, query in (_group_views(sql) | _record_views(sql)).items()
    }
    for sql in (_Sql("sqlite"), _Sql("postgresql"))
}
VIEWS = tuple(CREATE_VIEWS["sqlite"])
