"""Servers that refuse, and places that are read-only."""

from __future__ import annotations

import asyncio
import socket
import struct
import uuid
from pathlib import Path

import pytest
from sqlalchemy import make_url

from replaybuf import ReplayBufferConfig
from replaybuf.errors import AccessError, UnreachableError
from tests.bad_input.conftest import refused_put
from tests.faults.test_postgres_connections import END_ALL
from tests.postgres import execute, set_default
from tests.scripts import run
from tests.stores import TASK, build, fill, group, numbers_of, take_all


async def test_a_database_that_becomes_read_only_says_so_and_goes_on_afterwards(lent_database: str) -> None:
    """As managed databases do whose disk is nearly full. Readers go on."""
    async with build(lent_database) as buffer:
        await fill(buffer, 3)
        set_default(lent_database, default_transaction_read_only="on")
        execute(lent_database, END_ALL)
        for call in (buffer.put(group(3), TASK), buffer.get(1, TASK)):
            with pytest.raises(
                AccessError, match=r"read-only transaction; it is a standby .* default_transaction_read_only is set"
            ):
                await call
        assert await buffer.count(TASK, "completed") == 3
        name = make_url(lent_database).database
        server = make_url(lent_database).set(database="postgres").render_as_string(hide_password=False)
        execute(server, f"ALTER DATABASE {name} RESET default_transaction_read_only")
        execute(server, END_ALL.replace("current_database()", f"'{name}'"))
        await buffer.put(group(3), TASK)
        assert await take_all(buffer) == [0, 1, 2, 3]


async def test_a_role_without_a_connection_left_waits_until_there_is_one(postgres_database: str) -> None:
    role = f"few_{uuid.uuid4().hex[:8]}"
    execute(postgres_database, f"CREATE ROLE {role} LOGIN; GRANT ALL ON SCHEMA public TO {role}")
    url = make_url(postgres_database).set(username=role).render_as_string(hide_password=False)
    try:
        async with build(url) as buffer:
            await fill(buffer, 2)
            execute(postgres_database, f"ALTER ROLE {role} CONNECTION LIMIT 0")
            execute(postgres_database, END_ALL)
            waiting = asyncio.create_task(buffer.put(group(2), TASK))
            error = await refused_put(url, UnreachableError)
            assert f'too many connections for role "{role}"; raise its max_connections' in str(error)
            assert not waiting.done()
            execute(postgres_database, f"ALTER ROLE {role} CONNECTION LIMIT -1")
            await asyncio.wait_for(waiting, 20)
            assert await take_all(buffer) == [0, 1, 2]
    finally:
        execute(postgres_database, f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_what_a_server_says_before_it_resets_a_connection_is_said() -> None:
    """As PgBouncer does with a client that it kept waiting, and whose statements it has not read."""

    def message(kind: bytes, body: bytes) -> bytes:
        return kind + struct.pack("!I", len(body) + 4) + body

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(message(b"R", bytes(4)) + message(b"S", b"server_version\x0016.1\0") + message(b"Z", b"I"))
        await reader.read(1)
        writer.write(message(b"E", b"SFATAL\0C08P01\0Mquery_wait_timeout\0\0"))
        await asyncio.sleep(0.2)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        error = str(await refused_put(f"postgresql://trainer@127.0.0.1:{port}/rl?sslmode=disable", UnreachableError))
    assert "query_wait_timeout; PgBouncer says this" in error


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_is_read_only_can_not_be_written_to(open_folder: Path, what: str) -> None:
    file = open_folder / "buffer.db"
    with ReplayBufferConfig(url=f"sqlite:///{file}").build_sync() as buffer:
        buffer.put_many([group(number) for number in range(2)], TASK)
    file.chmod(0o444 if what == "file" else 0o666)
    open_folder.chmod(0o777 if what == "file" else 0o555)
    run(
        """
        import shutil, tempfile, pytest
        from typer.testing import CliRunner
        from replaybuf.cli.commands import app

        async def main():
            buffer = build(url)
            for call in (buffer.put(group(1), TASK), buffer.get(1, TASK), buffer.delete({})):
                with pytest.raises(AccessError, match="read-only|can't be opened"):
                    await call
            await buffer.close()

        def look():
            # Those who only look can export and save, too, where SQLite can make its log.
            folder = tempfile.mkdtemp(dir="/tmp")
            for words in (["export", url, f"{folder}/all.jsonl"], ["checkpoint", "save", url, f"{folder}/saved"]):
                done = CliRunner().invoke(app, words)
                assert (done.exit_code == 0) == (sys.argv[2] == "file" or os.getuid() == 0), done.output
                assert done.exit_code == 0 or "check the permissions of the file and of its folder" in done.output
            shutil.rmtree(folder)

        if os.getuid() == 0:
            asyncio.run(asyncio.sleep(0))
            look()  # imports what the other user may be unable to
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        asyncio.run(main())
        look()
        """,
        f"sqlite:///{file}",
        what,
    )
    open_folder.chmod(0o755)
    file.chmod(0o644)
    with ReplayBufferConfig(url=f"sqlite:///{file}", policy="fifo").build_sync() as buffer:
        assert numbers_of(buffer.get(2, TASK)) == [0, 1]
