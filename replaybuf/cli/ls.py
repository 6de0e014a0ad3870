"""`replaybuf ls`: the metadata of groups."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from replaybuf import units
from replaybuf.cli.groups import age_of, archived_at, lease_text, status_style, tags_text
from replaybuf.cli.options import Buffer, Limit, OfStatus, OfTask, OrderBy, Url, Where, listing
from replaybuf.cli.output import Column, Output
from replaybuf.cli.queries import nothing_in, query_of
from replaybuf.query import Node
from replaybuf.redact import redact
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.policies import Order, parse_order
from replaybuf.storage.sql.inspection.groups import Listing, list_oldest
from replaybuf.storage.sql.inspection.reader import Reader, open_reader


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
    if where or order_by or status not in (None, *Status):
        found = _matching(reader, buffer, query, order, limit or None, count=output.for_people)
    else:
        found = reader.read(lambda tx: list_oldest(tx, buffer, task, status, limit or None, count=output.for_people))
    rows = found.rows
    if not rows and output.for_people:
        output.note(nothing_in(reader, buffer, task) if where or task or status else "the buffer is empty")
        return
    output.rows(rows, _columns(rows, found.now, found.several))
    if found.matching > len(rows):
        output.note(f"{len(rows):,} of {found.matching:,} groups; --limit 0 shows all")


def _matching(
    reader: Reader, buffer: str | None, query: Node, order: Order, limit: int | None, *, count: bool
) -> Listing:
    from replaybuf.storage.sql.inspection.group_queries import (
        list_groups,  # the query language is made of SQLAlchemy's parts
    )

    return reader.read(lambda tx: list_groups(tx, buffer, query, order, limit, count=count))


def _columns(rows: list[dict[str, Any]], now: datetime, several: bool) -> list[Column]:
    columns = {
        "uid": Column("uid", lambda r: str(r["uid"])),
        "buffer": Column("buffer", lambda r: r["buffer"], right=False, text=True),
        "task_name": Column("task", lambda r: r["task_name"], right=False, text=True),
        "status": Column("status", lambda r: r["status"], right=False, style=status_style),
        "leased_until": Column("leased", lambda r: lease_text(r["leased_until"], now)),
        "deliveries": Column("deliveries", lambda r: units.number(r["deliveries"]), spare=True),
        "staleness": Column("stale", lambda r: units.number(r["staleness"])),
        "reward": Column("reward", lambda r: units.number(r["reward"], 3)),
        "priority": Column("priority", lambda r: f"{r['priority']:g}", spare=True),
        "times_sampled": Column("sampled", lambda r: units.number(r["times_sampled"]), spare=True),
        "rollouts": Column("rollouts", lambda r: units.number(r["rollouts"]), spare=True),
        "response_tokens": Column("tokens", lambda r: units.short(r["response_tokens"]), spare=True),
        "created_at": Column("age", lambda r: units.age(age_of(r["created_at"], now))),
        "archived_at": Column("archived", lambda r: units.age(age_of(archived_at(r), now)), spare=True),
        "tags": Column("tags", lambda r: tags_text(r["tags"]), right=False, text=True),
        "prompt": Column("prompt", lambda r: r["error"] or r["prompt"] or "", right=False, text=True),
    }
    # Columns that many buffers don't use are shown only if they have values.
    unused: dict[str, Any] = {"priority": 1.0, "times_sampled": 0, "deliveries": 0}
    unused |= dict.fromkeys(("leased_until", "tags"))
    if not any(map(archived_at, rows)):
        del columns["archived_at"]
    chosen = {
        name: c for name, c in columns.items() if name not in unused or any(r[name] != unused[name] for r in rows)
    }
    if not several:
        del chosen["buffer"]
    return list(chosen.values())
