"""Ways to a PostgreSQL beside TCP alone: CPU of puts by TLS, and latency of puts and takes through PgBouncer.

The server is Debian's (`apt-get install postgresql pgbouncer`), because that of the other benchmarks has no TLS.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import groups
from benchmarks.databases import TASK, execute, open_buffer, put_all, stop_sweeping
from benchmarks.table import Cost, Row, Settings, cost, number, quantiles
from replaybuf import ReplayBuffer

_USER = "postgres" if os.getuid() == 0 else None
#: The most CPU of puts by TLS, and the longest latency through PgBouncer, each beside TCP alone.
CPU_AIM, LATENCY_AIM = 1.1, 1.2
#: Groups of a turn, by their size.
SIZES: dict[str, tuple[Callable[[], Any], int]] = {"1 KB": (groups.small, 4096), "100 KB": (groups.arrays, 512)}


async def run(settings: Settings) -> AsyncIterator[Row]:
    """Yield a row for TLS and each size, and one for PgBouncer; none without the programs."""
    programs = _programs()
    if "postgresql" not in settings.databases or programs is None:
        return
    with _server(programs) as (port, certificate):
        plain = f"postgresql://postgres@127.0.0.1:{port}/plain?sslmode=disable"
        tls = f"postgresql://postgres@127.0.0.1:{port}/tls?sslmode=verify-full&sslrootcert={certificate}"
        await _make(port, "plain", "tls")
        for size in SIZES:
            yield await _cpu(settings, size, plain, tls)
        for place, (name, (setting, option)) in enumerate(_poolers().items()):
            direct, behind = f"direct{place}", f"pooled{place}"
            await _make(port, direct, behind)
            with _pooler(port, behind, setting) as pooled:
                direct = f"postgresql://postgres@127.0.0.1:{port}/{direct}"
                yield await _latency(settings, name, direct, pooled + option)


async def _make(port: int, *names: str) -> None:
    for name in names:
        await execute(f"postgresql://postgres@127.0.0.1:{port}/postgres", f"CREATE DATABASE {name}")


async def _cpu(settings: Settings, size: str, plain: str, tls: str) -> Row:
    """Puts by each way in turn, A B, then B A, after a warm-up."""
    make, full = SIZES[size]
    count = settings.size(full, full // 8)
    costs: dict[str, list[Cost]] = {plain: [], tls: []}
    async with AsyncExitStack() as stack:
        buffers = {url: await stack.enter_async_context(open_buffer(url)) for url in costs}
        for buffer in buffers.values():
            await stop_sweeping(buffer)
        for turn in range(settings.rounds + 1):
            for url in list(costs) if turn % 2 else reversed(list(costs)):
                fresh = [make() for _ in range(count)]
                taken = await cost(_puts(buffers[url], fresh))
                costs[url] += [taken] if turn else []
                await _empty(buffers[url])
    cpu = {url: statistics.median(one.cpu for one in all_) / count * 1e6 for url, all_ in costs.items()}
    ratios = [theirs.cpu / ours.cpu for theirs, ours in zip(costs[tls], costs[plain], strict=True)]
    middle = statistics.median(ratios)
    return Row(
        "ways",
        f"TLS: CPU for each put of {size}",
        f"{number(cpu[tls])} us",
        f"TCP alone {number(cpu[plain])} us",
        f"{number(middle)} ({number(min(ratios))}..{number(max(ratios))})",
        f"<= {CPU_AIM:g}",
        middle <= CPU_AIM,
    )


def _puts(buffer: ReplayBuffer, fresh: list[Any]) -> Callable[[], Any]:
    return lambda: put_all(buffer, fresh)


async def _empty(buffer: ReplayBuffer) -> None:
    while await buffer.get(256, TASK):
        pass


async def _latency(settings: Settings, name: str, direct: str, pooled: str) -> Row:
    """One put and one take at a time."""
    taken: dict[str, list[float]] = {direct: [], pooled: []}
    ratios = []
    async with AsyncExitStack() as stack:
        buffers = {url: await stack.enter_async_context(open_buffer(url)) for url in taken}
        for turn in range(settings.rounds + 1):
            pair = {}
            for url in list(taken) if turn % 2 else reversed(list(taken)):
                pair[url] = await _pairs(buffers[url], settings.size(200, 50))
            if turn:
                ratios.append(statistics.median(pair[pooled]) / statistics.median(pair[direct]))
                for url, found in pair.items():
                    taken[url] += found
    middle = statistics.median(ratios)
    return Row(
        "ways",
        f"PgBouncer in {name}: one put and one take of 1 KB",
        quantiles(taken[pooled]),
        f"direct {quantiles(taken[direct])}",
        f"{number(middle)} ({number(min(ratios))}..{number(max(ratios))})",
        f"<= {LATENCY_AIM:g}",
        middle <= LATENCY_AIM,
    )


async def _pairs(buffer: ReplayBuffer, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        group = groups.small()
        start = time.perf_counter()
        await buffer.put(group, TASK, model_step=groups.MODEL_STEP, current_train_step=groups.TRAIN_STEP)
        assert await buffer.get(1, TASK)
        taken.append(time.perf_counter() - start)
    return taken


# Programs


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parts[-2]))
    return found[-1] if found else None


@contextmanager
def _server(programs: Path) -> Iterator[tuple[int, Path]]:
    """A server with TLS: its port, and its certificate, which it has signed itself."""
    folder, port = Path(tempfile.mkdtemp(prefix="rb-ways-")), _free_port()
    data, key, certificate = folder / "data", folder / "server.key", folder / "server.crt"

    def control(*arguments: object) -> None:
        command = [programs / "pg_ctl", "-w", "-D", data, *arguments]
        subprocess.run([*map(str, command)], user=_USER, cwd=folder, check=True, stdout=subprocess.DEVNULL)

    try:
        request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
        request += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(request, check=True, capture_output=True)
        for path in (folder, key, certificate):
            if _USER:
                shutil.chown(path, _USER)
        certificate.chmod(0o644)
        folder.chmod(0o755)
        control("initdb", "-o", "-A trust -U postgres -E utf8 --locale=C")
        settings = f"-p {port} -h 127.0.0.1 -k {folder} -c ssl=on -c ssl_cert_file={certificate} -c ssl_key_file={key}"
        control("-o", settings, "-l", folder / "log", "start")
        try:
            yield port, certificate
        finally:
            control("-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _poolers() -> dict[str, tuple[str, str]]:
    """Return modes of PgBouncer by name: its settings, and the option of the URL; none where it isn't installed."""
    if not shutil.which("pgbouncer"):
        return {}
    said = subprocess.run(["pgbouncer", "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = map(int, re.findall(r"(\d+)\.(\d+)", said)[0])
    modes = {
        "session mode": ("pool_mode = session", ""),
        "transaction mode, no prepared statements": ("pool_mode = transaction", "?statement_cache_size=0"),
    }
    if (major, minor) >= (1, 21):
        modes["transaction mode"] = ("pool_mode = transaction\nmax_prepared_statements = 500", "")
    return modes


@contextmanager
def _pooler(port: int, database: str, setting: str) -> Iterator[str]:
    """PgBouncer before a server, with the settings of docs/operating.md and another; the URL of a database."""
    own = _free_port()
    text = (Path(__file__).parents[1] / "docs" / "operating.md").read_text("utf-8")
    ignored = next(line for line in text.splitlines() if line.startswith("ignore_startup_parameters"))
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
        file.write(
            f"[databases]\n{database} = host=127.0.0.1 port={port} user=postgres\n[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {own}\nunix_socket_dir =\nauth_type = any\n{setting}\n{ignored}\n"
        )
        file.flush()
        os.chmod(file.name, 0o644)
        process = subprocess.Popen(["pgbouncer", "-q", file.name], user=_USER)
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", own), 1):
                    break
                time.sleep(0.05)
            yield f"postgresql://postgres@127.0.0.1:{own}/{database}"
        finally:
            process.kill()  # since 1.23 it waits for its clients otherwise
            process.wait(10)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
