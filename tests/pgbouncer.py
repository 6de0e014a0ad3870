"""A PgBouncer for tests, with the settings that docs/operating.md names."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.pages import DOCS

IS_INSTALLED = shutil.which("pgbouncer") is not None
_RELOADED = "re-reading config"
_USER = "nobody"  # PgBouncer refuses to run as root


class Pooler:
    """One that pools connections to the database `rl`: fewer than a buffer wants."""

    def __init__(self, folder: Path, target: str, mode: str, more: str) -> None:
        self._config, self._mode, self._port = folder / "pgbouncer.ini", mode, free_port()
        self._settings = f"{documented_settings()}\n{more}"
        self._configure(target)
        for parent in (folder, *folder.parents):
            if parent.is_relative_to(tempfile.gettempdir()) and parent.stat().st_uid == os.getuid():
                os.chmod(parent, parent.stat().st_mode | 0o055)
        self._log = folder / "pgbouncer.log"
        with open(self._log, "wb") as log:
            user = _USER if os.getuid() == 0 else None
            self._process = subprocess.Popen(["pgbouncer", self._config], user=user, stdout=log, stderr=log)

    @property
    def url(self) -> str:
        return f"postgresql://trainer@127.0.0.1:{self._port}/rl?statement_cache_size=0"

    def point_to(self, target: str) -> None:
        """Pool connections to another server from now on."""
        self._configure(target)
        before = self._log.read_text().count(_RELOADED)
        self._process.send_signal(signal.SIGHUP)
        _wait_until(lambda: self._log.read_text().count(_RELOADED) > before, "PgBouncer doesn't read its settings")

    def _configure(self, target: str) -> None:
        self._config.write_text(
            f"[databases]\nrl = {target}\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self._port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = {self._mode}\ndefault_pool_size = {6 if self._mode == 'transaction' else 40}\n"
            f"server_login_retry = 1\n{self._settings}\n"
        )

    def wait(self) -> None:
        """Return when it listens."""
        _wait_until(lambda: "listening on" in self._log.read_text() or self._process.poll() is not None, "no PgBouncer")
        assert self._process.poll() is None, self._log.read_text()

    def stop(self) -> None:
        self._process.kill()  # since 1.23 it waits for its clients otherwise
        self._process.wait(10)


def _wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    for _ in range(200):
        if holds():
            return
        time.sleep(0.05)
    raise TimeoutError(f"{otherwise} after 10 s")


def free_port() -> int:
    """A port for a server, below those that systems give to connections: one of these may take it meanwhile."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", random.randrange(12_000, 32_000)))
            return int(free.getsockname()[1])


def documented_settings() -> str:
    """What the page says that has to be set."""
    (ignored,) = re.findall(r"ignore_startup_parameters = .*", (DOCS / "operating.md").read_text())
    return str(ignored.strip())


@contextmanager
def pooled(folder: Path, target: str, mode: str = "transaction", more: str = "") -> Iterator[Pooler]:
    """A pooler before a server, given as PgBouncer's `host=... user=... dbname=...`, with `more` settings."""
    pooler = Pooler(folder, target, mode, more)
    try:
        pooler.wait()
        yield pooler
    finally:
        pooler.stop()
