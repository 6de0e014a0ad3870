"""What is done to the schema of a database: by a process that is killed at each fail point, or by several together."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.synchronize import Barrier

from sqlalchemy import Connection, text

from replaybuf import Status
from replaybuf.storage.sql.inspection.writer import transaction_of, upgrade
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.statements.new_rows import encode_group
from replaybuf.storage.values import NewGroup
from tests.contract.harness import CODEC
from tests.faults.ledger import Ledger
from tests.stores import TASK, build, group

COUNT = 10


def _create(connection: Connection) -> None:
    create_schema(transaction_of(connection), "here")


def _nothing(_: Connection) -> None:
    pass


def fill_old(connection: Connection) -> None:
    """A database of the first version, with COUNT groups."""
    upgrade(connection, "0001")
    connection.execute(text("INSERT INTO rb_lane (id, task_name, status, step) VALUES (1, :task, 'completed', 9)"),
                       {"task": TASK})  # fmt: skip
    marks = "CAST(:marks AS jsonb)" if connection.dialect.name == "postgresql" else ":marks"
    for uid in range(1, COUNT + 1):
        one = encode_group(CODEC, NewGroup(TASK, Status.COMPLETED, 3, group(uid), 1.0))
        connection.execute(
            text(
                "INSERT INTO rb_group (uid, lane, oldest_step, mixed, priority, times_sampled, created_at, bytes,"
                f" marks) VALUES (:uid, 1, 5, :no, 1.0, 0, 1.0, :size, {marks})"
            ),
            {"uid": uid, "no": False, "size": len(one.payload), "marks": one.marks},
        )
        connection.execute(
            text("INSERT INTO rb_payload (uid, outline, data) VALUES (:uid, '[]', :data)"),
            {"uid": uid, "data": one.payload},
        )
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT setval('rb_uid', :uid)"), {"uid": COUNT})
    else:
        connection.execute(text("UPDATE rb_counter SET value = :uid"), {"uid": COUNT})


SCHEMAS: dict[str, tuple[Callable[[Connection], None], Callable[[Connection], None]]] = {
    "create the schema": (_nothing, _create),
    "upgrade": (fill_old, upgrade),
}


async def open_together(_: Ledger, url: str, number: int, barrier: Barrier) -> None:
    """A process that opens a new database at the same moment as others, and puts a group into it."""
    barrier.wait(60)
    async with build(url) as buffer:
        await buffer.put(group(number), TASK)
