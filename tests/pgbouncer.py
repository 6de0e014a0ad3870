"""A PgBouncer for tests, with the settings that docs/pgbouncer.md names."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.pages import DOCS

IS_INSTALLED = shutil.which("pgbouncer") is not None
_USER = "nobody"  # PgBouncer refuses to run as root


class Pooler:
    """One that pools connections to the database `rl`: fewer than a buffer wants."""

    def __init__(self, folder: Path, target: str, mode: str) -> None:
        self._config, self._mode = folder / "pgbouncer.ini", mode
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._configure(target)
        for one in (folder, *folder.parents[:2]):
            os.chmod(one, 0o755)
        self._process = subprocess.Popen(["pgbouncer", self._config], user=_USER if os.getuid() == 0 else None)

    @property
    def url(self) -> str:
        return f"postgresql://trainer@127.0.0.1:{self.port}/rl?statement_cache_size=0"

    def point_to(self, target: str) -> None:
        """Pool connections to another server from now on."""
        self._configure(target)
        self._process.send_signal(signal.SIGHUP)

    def _configure(self, target: str) -> None:
        (ignored,) = re.findall(r"ignore_startup_parameters = .*", (DOCS / "pgbouncer.md").read_text())
        self._config.write_text(
            f"[databases]\nrl = {target}\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = {self._mode}\ndefault_pool_size = {6 if self._mode == 'transaction' else 40}\n"
            f"server_login_retry = 1\n{ignored.strip()}\n"
        )

    def wait(self) -> None:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError("PgBouncer doesn't listen after 10 s")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)


@contextmanager
def pooled(folder: Path, target: str, mode: str = "transaction") -> Iterator[Pooler]:
    """A pooler before a server, given as PgBouncer's `host=... user=... dbname=...`."""
    pooler = Pooler(folder, target, mode)
    try:
        pooler.wait()
        yield pooler
    finally:
        pooler.stop()
