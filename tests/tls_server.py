"""A PostgreSQL that speaks TLS: Debian's. (That of the other tests is built without.)"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.certificates import Authority, Signed

#: Who is admitted, and how.
HBA = """
local all all trust
hostssl all certified 127.0.0.1/32 cert
hostssl all guarded 127.0.0.1/32 scram-sha-256
hostssl all postgres 127.0.0.1/32 trust
host all plain 127.0.0.1/32 trust
"""


def installed() -> Path | None:
    """The folder of the newest server's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class TLSServer:
    """A server with a certificate of an authority, which may be changed."""

    def __init__(self, programs: Path, folder: Path, authority: Authority) -> None:
        self._programs, self._folder = programs, folder
        self.authority = authority
        self.port = free_port()
        self._data = folder / "data"
        # PostgreSQL refuses to run as root.
        self._user = "postgres" if os.getuid() == 0 else None
        self._own(folder)

    def _own(self, path: Path) -> None:
        if self._user:
            entry = pwd.getpwnam(self._user)
            os.chown(path, entry.pw_uid, entry.pw_gid)

    def _run(self, program: str, *arguments: object) -> None:
        subprocess.run(
            [self._programs / program, *map(str, arguments)],
            user=self._user,
            cwd=self._folder,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=60,
        )

    def make(self) -> None:
        self._run("initdb", "-D", self._data, "--auth=trust", "-U", "postgres", "-E", "utf8", "--locale=C", "-N")
        (self._data / "pg_hba.conf").write_text(HBA)
        with (self._data / "postgresql.conf").open("a") as file:
            file.write(
                f"port = {self.port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = '{self._folder}'\n"
                "fsync = off\nssl = on\nssl_ca_file = 'ca.crt'\n"
            )
        self.install(self.authority.sign("server", "localhost", "127.0.0.1"))

    def install(self, signed: Signed) -> None:
        """Let it have another certificate; `reload` or `start` makes it use that."""
        for source, name in (
            (signed.certificate, "server.crt"),
            (signed.key, "server.key"),
            (self.authority.certificate, "ca.crt"),
        ):
            shutil.copy(source, self._data / name)
            (self._data / name).chmod(0o600)
            self._own(self._data / name)

    def start(self) -> None:
        self._run("pg_ctl", "-w", "-D", self._data, "-l", self._folder / "log", "start")

    def reload(self) -> None:
        self._run("pg_ctl", "-D", self._data, "reload")

    def stop(self) -> None:
        self._run("pg_ctl", "-w", "-D", self._data, "-m", "immediate", "stop")

    def url(self, user: str, *options: str) -> str:
        """By TCP."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/postgres{'?' if options else ''}{'&'.join(options)}"

    @property
    def owner(self) -> str:
        """The URL of the superuser, by the socket."""
        return f"postgresql://postgres@/postgres?host={self._folder}&port={self.port}"


@contextmanager
def tls_server() -> Iterator[TLSServer]:
    """A new one, which runs until the block is left; without Debian's package the test is skipped."""
    programs = installed()
    if programs is None:
        pytest.skip("Debian's package postgresql isn't installed, whose server speaks TLS")
    folder = Path(tempfile.mkdtemp(prefix="rb-tls-"))
    try:
        server = TLSServer(programs, folder, Authority(folder / "ca"))
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
