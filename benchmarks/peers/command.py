"""`python -m benchmarks peers`: replaybuf, its peers and the floors with the same groups, in turn."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.databases import new_database, new_folder, postgres_server
from benchmarks.peers.adapter import KINDS, SIZES
from benchmarks.peers.environments import CannotInstallError, python_of, say
from benchmarks.peers.registry import PEERS, Peer
from benchmarks.peers.tables import tables

ROOT = Path(__file__).parents[2]
#: Groups that are put and taken in a turn, by size.
COUNTS = {"1K": 4096, "100K": 512, "2M": 64}
PAIR = 2048
TIMEOUT_SECONDS = 300
KILLED = "killed"


@dataclass(slots=True)
class Result:
    """What is known of a peer: its turns by row ("groups 100K arrays", "lone", ...), and why some are missing."""

    title: str
    power: str
    note: str
    version: str
    turns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def main(arguments: list[str]) -> int:
    """Run the command. Return its exit status: 0 also when a peer can't be measured, which the tables say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("--only", action="append", choices=PEERS, metavar="NAME", help=f"one of {', '.join(PEERS)}")
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"some of {','.join(SIZES)} (default: all)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"some of {','.join(KINDS)} (default: both)")
    parser.add_argument("--rounds", type=int, default=0, help="how often each is measured (default: 5; 2 if quick)")
    parser.add_argument("--quick", action="store_true", help="an eighth of the groups: a look, not a measurement")
    parser.add_argument("--json", metavar="FILE", help="write all that was measured to this file")
    options = parser.parse_args(arguments)
    sizes, kinds = options.sizes.split(","), options.kinds.split(",")
    if unknown := ({*sizes} - {*SIZES}) | ({*kinds} - {*KINDS}):
        parser.error(f"no such size or kind: {', '.join(sorted(unknown))}")
    if options.rounds < 0:
        parser.error(f"--rounds {options.rounds}: must be positive")
    rows = [("groups", size, kind) for size in sizes for kind in kinds]
    rows += [("lone", "1K", "arrays"), ("wake", "1K", "arrays"), ("pair", "100K", "arrays"), ("kill", "1K", "arrays")]
    rounds = options.rounds or (2 if options.quick else 5)
    results = asyncio.run(measure(options.only or list(PEERS), rows, rounds, 8 if options.quick else 1))
    print(tables(results, rows))
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": _machine(), "peers": results}, indent=1, default=_plain))
    return 0


async def measure(names: list[str], rows: list[tuple[str, str, str]], rounds: int, fraction: int) -> dict[str, Result]:
    """Measure each row of all peers: A B C, then C B A, and so on, each turn in a process of its own."""
    results = {name: _start(name) for name in names}
    server = await _postmaster() if any(PEERS[name].postgres for name in names) else None
    for turn, size, kind in rows:
        row = f"{turn} {size} {kind}"
        for at in range(1 if turn == "kill" else rounds):
            for name in names if at % 2 == 0 else names[::-1]:
                result, peer = results[name], PEERS[name]
                if row in result.missing or "all" in result.missing:
                    continue
                full_count = PAIR if turn == "pair" else COUNTS[size]
                count = max(64, int(full_count * peer.share) // fraction)
                task = {"adapter": peer.adapter, "turn": turn, "size": size, "kind": kind, "count": count}
                start = time.monotonic()
                outcome = await _turn(peer, task, server)
                say(f"{name}, {row}: {outcome.get('missing') or f'{time.monotonic() - start:.1f} s'}")
                if "missing" in outcome:
                    result.missing[row] = outcome["missing"]
                else:
                    result.turns.setdefault(row, []).append(outcome)
    return results


def _start(name: str) -> Result:
    peer = PEERS[name]
    result = Result(peer.title, peer.power, peer.note, peer.version)
    try:
        python_of(peer.environment)
    except CannotInstallError as error:
        say(f"{name}: can't be installed: {error}")
        result.missing["all"] = f"can't be installed: {error}"
    return result


async def _turn(peer: Peer, task: dict[str, Any], server: int | None) -> dict[str, Any]:
    async with new_folder() as folder, new_database("postgresql" if peer.postgres else "sqlite") as url:
        task |= {
            "folder": str(folder),
            "url": url if peer.postgres else "",
            "server": server if peer.postgres else None,
        }
        if task["turn"] == "kill":
            outcome = await _run(peer, task)
            return await _run(peer, task | {"turn": "left"}) if outcome["missing"] == KILLED else outcome
        return await _run(peer, task)


async def _run(peer: Peer, task: dict[str, Any]) -> dict[str, Any]:
    """Run a turn in the peer's environment. Return what it printed, or why there is nothing under "missing"."""
    process = await asyncio.create_subprocess_exec(
        *(python_of(peer.environment), "-m", "benchmarks.peers.turn", json.dumps(task)),
        cwd=task["folder"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), TIMEOUT_SECONDS)
    except TimeoutError:
        return {"missing": f"not done after {TIMEOUT_SECONDS} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):  # servers that it left behind
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        outcome: dict[str, Any] = json.loads(output.decode().splitlines()[-1])
        return outcome
    if process.returncode == -signal.SIGKILL:
        return {"missing": KILLED}
    lines = errors.decode().strip().splitlines() or [f"exit status {process.returncode}"]
    return {"missing": lines[-1][:200]}


async def _postmaster() -> int | None:
    """Return the main process of the PostgreSQL server, or None if it isn't on this machine."""
    import asyncpg
    import psutil

    connection = await asyncpg.connect(postgres_server())
    try:
        backend = psutil.Process(await connection.fetchval("SELECT pg_backend_pid()"))
        return backend.ppid() if "postgres" in backend.name() else None
    except psutil.NoSuchProcess:
        return None
    finally:
        await connection.close()


def _machine() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def _plain(result: Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in Result.__slots__}
