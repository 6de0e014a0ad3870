"""What is said of a primary's synchronous standbys, and of the servers of a URL: functions of values."""

from __future__ import annotations

import pytest

from replaybuf.cli.doctor.check_database import Server, servers_of
from replaybuf.errors import ReplayBufError, UnreachableError
from replaybuf.storage.sql.engine.outage import Synchronous

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("names", "wanted"),
    [("", 0), ("*", 1), ("db2, db3", 1), ("2 (db2, db3)", 2), ("FIRST 2 (db2, db3, db4)", 2), ("any 3(*)", 3)],
)
def test_how_many_standbys_a_commit_waits_for(names: str, wanted: int) -> None:
    assert Synchronous(names, 0, 0).wanted == wanted


PRIMARY = Server("17.2", False)
STANDBY = Server("17.2", True)


AWAY = UnreachableError("can't reach it")


def said(servers: dict[str, Server | ReplayBufError]) -> list[tuple[str, str]]:
    return [(str(one.level), one.text) for one in servers_of(servers)]


def test_each_server_of_a_cluster_has_a_line() -> None:
    assert said({"a:1": PRIMARY, "b:2": STANDBY, "c:3": AWAY}) == [
        ("ok", "a:1 is a primary, PostgreSQL 17.2"),
        ("ok", "b:2 is a standby, PostgreSQL 17.2"),
        ("warning", "c:3 can't be used: can't reach it"),
    ]
    assert all(one.mend for one in servers_of({"a:1": PRIMARY, "c:3": AWAY}) if str(one.level) != "ok")


@pytest.mark.parametrize(
    ("servers", "level", "text"),
    [
        ({"a": PRIMARY, "b": PRIMARY}, "problem", "a and b both say that they are the primary"),
        ({"a": STANDBY, "b": STANDBY}, "problem", "none of the servers is a primary"),
    ],
)
def test_a_cluster_that_is_not_one_is_said(servers: dict[str, Server | ReplayBufError], level: str, text: str) -> None:
    assert any(found == level and text in what for found, what in said(servers))


def test_servers_that_are_all_away_are_only_that() -> None:
    assert [level for level, _ in said({"a": AWAY, "b": AWAY})] == ["warning", "warning"]
