"""Databases in which something is wrong, and what the doctor says of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from sqlalchemy import Connection, text

from replaybuf import ReplayBufferConfig
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.inspection.writer import over_sqlalchemy
from tests.cli.conftest import run
from tests.contract.harness import group
from tests.postgres import execute

ONE = "(SELECT min(uid) FROM rb_group WHERE lease IS NULL AND archived_at IS NULL)"
LATER = "UPDATE rb_group SET leased_until = leased_until + 3600 WHERE lease IS NOT NULL"


def examine(url: object, *options: object, code: int = 0) -> dict[str, list[dict[str, Any]]]:
    """What the doctor finds, by check."""
    findings: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(run("doctor", url, *options, "--format=json", code=code).stdout):
        findings.setdefault(row["check"], []).append(row)
    return findings


def wrong(findings: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """The checks that found more than that all is fine, with their levels."""
    return {
        check: row["level"]
        for check, rows in findings.items()
        for row in rows
        if row["level"] != "ok" and check != "integrity"
    }


def everything(url: str) -> dict[str, list[Any]]:
    """All rows of the tables."""
    rows: dict[str, list[Any]] = {}

    def read(connection: Connection) -> None:
        for table in ("rb_lane", "rb_group", "rb_payload", "rb_past", "rb_tally", "rb_info"):
            rows[table] = sorted(map(str, connection.execute(text(f"SELECT * FROM {table}")).all()))

    asyncio.run(over_sqlalchemy(Access(parse_url(url)), read))
    return rows


DAMAGE = {
    "an index is missing": ("indexes", ["DROP INDEX rb_group_by_step"]),
    "a view is missing": ("indexes", ["DROP VIEW rollouts"]),
    "a payload is missing": ("payloads", [f"DELETE FROM rb_payload WHERE uid = {ONE}"]),
    "a payload is damaged": (
        "payloads",
        [f"UPDATE rb_payload SET data = (SELECT data FROM rb_payload WHERE uid = -1) WHERE uid = {ONE}"],
    ),
    "an archived payload is damaged": (
        "payloads",
        [
            "UPDATE rb_payload SET data = (SELECT data FROM rb_payload WHERE uid = -1) "
            "WHERE uid = (SELECT min(uid) FROM rb_group WHERE archived_at IS NOT NULL)"
        ],
    ),
    "a size is wrong": ("counts", ["UPDATE rb_tally SET amount = amount + 3 WHERE name = 'size'"]),
    "a count of leased ones is wrong": ("counts", ["DELETE FROM rb_tally WHERE name = 'leased'"]),
}


def break_it(url: str, statements: list[str]) -> None:
    damaged = any("uid = -1" in statement for statement in statements)
    data = "'x'" if url.startswith("sqlite") else r"'\x00'::bytea"
    if damaged:
        execute(url, f"INSERT INTO rb_payload (uid, outline, data) VALUES (-1, '[]', {data})")
    execute(url, *statements)
    if damaged:
        execute(url, "DELETE FROM rb_payload WHERE uid = -1")


def use(url: str) -> None:
    """The buffer works: what is put can be taken, and so can all that was there."""
    with ReplayBufferConfig(url=url, policy="fifo").build_sync() as buffer:
        before = buffer.count("math", "completed")
        buffer.put(group(1), "math")
        assert len(buffer.get(before + 1, "math")) == before + 1
        assert buffer.count("math", "completed") == 0


GONE = "(SELECT max(uid) FROM rb_past WHERE until IS NOT NULL)"
CHECKPOINTS = {
    "a group of it is gone": f"DELETE FROM rb_payload WHERE uid = {GONE}; DELETE FROM rb_past WHERE uid = {GONE}",
    "a group of it is smaller": f"UPDATE rb_past SET bytes = bytes - 1 WHERE uid = {GONE}",
    "a payload of it is gone": f"DELETE FROM rb_payload WHERE uid = {GONE}",
    "a payload of it is damaged": f"UPDATE rb_payload SET data = DAMAGED WHERE uid = {GONE}",
}


def checkpoint_and_take(url: str) -> None:
    """A checkpoint, and groups in it that have left the buffer since."""
    with ReplayBufferConfig(url=url, policy="fifo").build_sync() as buffer:
        buffer.put(group(7), "code")
        buffer.checkpoint(5)
        buffer.delete({"task_name": "code"})
        buffer.get(1, "math")
