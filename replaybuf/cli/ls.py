"""`replaybuf ls`: the metadata of groups."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from replaybuf import units
from replaybuf.cli.groups import age_of, columns
from replaybuf.cli.options import Buffer, Limit, OfStatus, OfTask, OrderBy, Url, Where, listing
from replaybuf.cli.output import Column, Output
from replaybuf.cli.queries import nothing_in, query_of
from replaybuf.redact import redact
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.policies import parse_order
from replaybuf.storage.sql.inspection.groups import archived_at, lease_text, list_oldest, tags_text
from replaybuf.storage.sql.inspection.reader import open_reader


@listing
def ls(
    url: Url,
    output: Output,
    where: Where = None,
    buffer: Buffer = None,
    task: OfTask = None,
    status: OfStatus = None,
    order_by: OrderBy = None,
    limit: Limit = 20,
) -> None:
    """List groups without reading their payloads.

    Fields of queries and orders are uid, task_name, status, staleness, priority, times_sampled, created_at (seconds
    since the epoch), reward (the mean of the group) and, in queries, tags.NAME. Without an order the oldest come first.
    Leased and archived groups are listed, too: "leased" says when the lease ends.

    \b
    Examples:
      replaybuf ls run.db --task math --order-by -reward --limit 5
      replaybuf ls run.db --where '{"staleness": {"$gte": 3}, "tags.level": {"$in": [4, 5]}}'
      replaybuf ls run.db --status failed --json --limit 0 | jq '.[].error'
    """
    query, order = query_of(where, task, status), parse_order([redact(term) for term in order_by or ()])
    reader = open_reader(url)
    at_most, count = limit or None, output.for_people
    if where or order_by or status not in (None, *Status):
        from replaybuf.storage.sql.inspection.group_queries import list_groups  # imports SQLAlchemy

        found = reader.read(lambda tx: list_groups(tx, buffer, query, order, at_most, count=count))
    else:
        found = reader.read(lambda tx: list_oldest(tx, buffer, task, status, at_most, count=count))
    rows = found.rows
    if not rows and output.for_people:
        output.note(nothing_in(reader, buffer, task) if where or task or status else "the buffer is empty")
        return
    output.rows(rows, _columns(rows, found.now, found.several))
    if found.matching > len(rows):
        output.note(f"{len(rows):,} of {found.matching:,} groups; --limit 0 shows all")


#: Columns that many buffers don't use, which are shown only if they have other values than these.
_UNUSED: dict[str, tuple[str, Any]] = {
    "leased": ("leased_until", None),
    "deliveries": ("deliveries", 0),
    "priority": ("priority", 1.0),
    "sampled": ("times_sampled", 0),
    "tags": ("tags", None),
}


def _columns(rows: list[dict[str, Any]], now: datetime, several: bool) -> list[Column]:
    found = [
        *columns("uid", "buffer", "task_name", "status"),
        Column("leased", lambda r: lease_text(r["leased_until"], now)),
        *columns("deliveries", "staleness", "reward", spare=("deliveries",)),
        Column("priority", lambda r: f"{r['priority']:g}", spare=True),
        *columns(
            "times_sampled", "rollouts", "response_tokens", spare=("times_sampled", "rollouts", "response_tokens")
        ),
        Column("age", lambda r: units.age(age_of(r["created_at"], now))),
        Column("archived", lambda r: units.age(age_of(archived_at(r), now)), spare=True),
        Column("tags", lambda r: tags_text(r["tags"]), right=False, text=True),
        Column("prompt", lambda r: r["error"] or r["prompt"] or "", right=False, text=True),
    ]
    hidden = {header for header, (name, usual) in _UNUSED.items() if all(row[name] == usual for row in rows)}
    hidden |= {"buffer"} if not several else set()
    hidden |= {"archived"} if not any(map(archived_at, rows)) else set()
    return [column for column in found if column.header not in hidden]
