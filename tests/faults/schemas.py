"""What is done to the schema of a database: by a process that is killed at each fail point, or by several together."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.synchronize import Barrier

from sqlalchemy import Connection

from replaybuf.storage.sql.inspection.writer import transaction_of, upgrade
from replaybuf.storage.sql.schema.create import create_schema
from tests.faults.ledger import Ledger
from tests.stores import TASK, build, group


def _create(connection: Connection) -> None:
    create_schema(transaction_of(connection), "here")


SCHEMAS: dict[str, Callable[[Connection], None]] = {"create the schema": _create, "upgrade": upgrade}


async def open_together(_: Ledger, url: str, number: int, barrier: Barrier) -> None:
    """A process that opens a new database at the same moment as others, and puts a group into it."""
    barrier.wait(60)
    async with build(url) as buffer:
        await buffer.put(group(number), TASK)
