"""A long life of a database at a low, steady rate: sizes, memory, files and latencies, every minute.

    python -m tests.long_life --minutes 120 [--folder FOLDER] [sqlite] [postgresql]

At the end it prints the first and the last ten minutes, and what the checker of histories finds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg

from tests.faults.processes import end, start
from tests.histories.history import Call, calls_in, violations
from tests.long_life import roles
from tests.postgres import new_database, own_server

ROLES = ("put", "take", "lease", "keep")
#: A transaction is left idle from the first to the second of these parts of the time.
IDLE = 0.25, 0.5
_DEAD = "SELECT coalesce(sum(n_dead_tup), 0)::int FROM pg_stat_user_tables"
_SIZE = "SELECT pg_database_size(current_database())"


class Life:
    """A database with its processes, and what was measured of them."""

    def __init__(self, url: str, folder: Path, minutes: float) -> None:
        (folder / "payloads").mkdir(parents=True, exist_ok=True)
        self._url, self._folder = url, folder
        self._place = str(folder / "payloads")
        self.began = time.monotonic()
        self._seconds = 60 * minutes
        self._processes: dict[str, BaseProcess] = {}
        self._idle: Any = None
        self._rows: list[dict[str, float]] = []

    def start(self, name: str) -> None:
        files = (self._folder / f"{name}.ledger", self._folder / f"{name}.calls")
        ends = self.began + self._seconds
        self._processes[name] = start(roles.play, files[0], name, self._url, self._place, files[1], ends)

    async def measure(self) -> None:
        """Add the numbers of a minute."""
        row = {"minute": (time.monotonic() - self.began) / 60, "idle": float(self._idle is not None)}
        row["payloads MB"] = _size_of(self._folder / "payloads")
        if self._url.startswith("sqlite"):
            row["database MB"] = _size_of(self._folder / "run.db")
            row["log MB"] = _size_of(self._folder / "run.db-wal")
        else:
            connection = await asyncpg.connect(self._url)
            row["database MB"] = await connection.fetchval(_SIZE) / 1e6
            row["dead rows"] = await connection.fetchval(_DEAD)
            row["connections"] = await connection.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            )
            await connection.close()
        for name in ROLES:
            process = self._processes[name]
            assert process.exitcode in (None, 0), f"{name} ended: {process.exitcode}"
            if process.exitcode is None:
                proc_folder = Path(f"/proc/{process.pid}")
                pages = int((proc_folder / "statm").read_text().split()[1])
                row[f"{name}: memory MB"] = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
                row[f"{name}: files"] = len(list((proc_folder / "fd").iterdir()))
        self._rows.append(row)
        with (self._folder / "minutes").open("a") as file:
            file.write(json.dumps(row) + "\n")

    async def idle(self) -> None:
        """Begin a transaction that reads, or end it, when it is time."""
        part = (time.monotonic() - self.began) / self._seconds
        if self._idle is None and IDLE[0] <= part < IDLE[1]:
            self._idle = await self._reading()
        elif self._idle is not None and part >= IDLE[1]:
            closed = self._idle.close()
            if closed is not None:
                await closed
            self._idle = None

    async def _reading(self) -> Any:
        if self._url.startswith("sqlite"):
            database = sqlite3.connect(self._folder / "run.db", isolation_level=None)
            database.execute("BEGIN")
            database.execute("SELECT count(*) FROM rb_group").fetchall()
            return database
        connection = await asyncpg.connect(self._url)
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await connection.fetchval("SELECT count(*) FROM rb_group")
        return connection

    def end(self) -> list[str]:
        """Wait for the processes, take what is left, and return the lines of a table."""
        for name in ROLES:
            end(self._processes[name], self._folder / f"{name}.ledger", 120)
        self.began, self._seconds = time.monotonic(), 300
        self.start("drain")
        end(self._processes["drain"], self._folder / "drain.ledger", 300)
        calls = calls_in(self._folder / f"{name}.calls" for name in (*ROLES, "drain"))
        problems = violations(calls)
        counts = {kind: sum(call.kind == kind and call.known for call in calls) for kind in KINDS}
        return [*self._table(calls), f"calls: {counts}", f"what no order explains: {problems[:20]} ({len(problems)})"]

    def _table(self, calls: list[Call]) -> Iterator[str]:
        first = min(call.begin for call in calls)
        minutes = self._rows[-1]["minute"]
        ten = min(10.0, minutes / 2)
        bounds = (0.0, ten), (minutes - ten, minutes)
        yield f"| | the first {ten:.0f} minutes | the last | the most of {minutes:.0f} |"
        yield "|---|---|---|---|"
        for name in [*dict.fromkeys(name for row in self._rows for name in row if name not in ("minute", "idle"))]:
            parts = [[r[name] for r in self._rows if a <= r["minute"] <= b and name in r] for a, b in bounds]
            highest = max(row.get(name, 0) for row in self._rows)
            yield f"| {name} | {median(parts[0] or [0]):.1f} | {median(parts[1] or [0]):.1f} | {highest:.1f} |"
        for kind in ("put", "take", "lease", "acknowledge"):
            parts = [sorted(_milliseconds(calls, kind, first, *b)) for b in bounds]
            for name, part in (("p50", 0.5), ("p99", 0.99)):
                values = [latencies[int(part * len(latencies))] if latencies else 0 for latencies in parts]
                yield f"| {kind}: {name} ms | {values[0]:.1f} | {values[1]:.1f} | |"


KINDS = ("put", "take", "lease", "acknowledge", "give back", "checkpoint", "restore")


def _milliseconds(calls: list[Call], kind: str, first: int, begin: float, end: float) -> Iterator[float]:
    for call in calls:
        if call.kind == kind and call.known and begin <= (call.begin - first) / 6e10 < end:
            yield (call.end - call.begin) / 1e6


def _size_of(path: Path) -> float:
    try:
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files) / 1e6
    except FileNotFoundError:  # a file of payloads that was just swept, or none at all
        return 0.0 if not path.is_dir() else _size_of(path)


@contextmanager
def url_of(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{folder / kind}/run.db"
    else:
        with own_server() as server, new_database(server.url) as url:
            yield url


async def live(lives: dict[str, Life], seconds: float) -> None:
    for life in lives.values():
        for name in ROLES:
            life.start(name)
            await asyncio.sleep(0.5)  # the first one creates the tables
    minute = time.monotonic()
    ends = minute + seconds
    while time.monotonic() < ends - 1:
        minute += min(60.0, seconds / 8)
        await asyncio.sleep(max(min(minute, ends) - time.monotonic(), 0))
        for life in lives.values():
            await life.measure()
            await life.idle()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.long_life")
    parser.add_argument("kinds", nargs="*", default=["sqlite", "postgresql"])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {kind: stack.enter_context(url_of(kind, folder)) for kind in options.kinds}
        lives = {kind: Life(url, folder / kind, options.minutes) for kind, url in urls.items()}
        asyncio.run(live(lives, 60 * options.minutes))
        for kind, life in lives.items():
            print(f"\n{kind}, {options.minutes:g} minutes\n", *life.end(), sep="\n", flush=True)


if __name__ == "__main__":
    main()
