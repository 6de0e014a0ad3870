"""What is said of a primary's synchronous standbys, and of the servers of a URL: functions of values."""

from __future__ import annotations

import pytest

from replaybuf.cli.doctor.check_server import _Server, findings
from replaybuf.errors import ReplayBufError, UnreachableError
from replaybuf.storage.sql.engine.standbys import HASTEN, START_ONE, Synchronous

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("names", "standbys", "there", "said", "is_short"),
    [
        ("", 0, 0, None, False),
        ("*", 0, 0, "asks for 1 standby, and 0 are connected", True),
        ("*", 1, 1, "asks for 1 standby, and 1 is connected", False),
        ("db2, db3", 2, 1, "asks for 1 standby, and 1 is connected (2 of any kind)", False),
        ("db2", 1, 0, "asks for 1 standby, and 0 are connected (1 of any kind)", True),
        ("2 (db2, db3)", 1, 1, "asks for 2 standbys, and 1 is connected", True),
        ("FIRST 2 (db2, db3, db4)", 3, 2, "asks for 2 standbys, and 2 are connected (3 of any kind)", False),
        ("any 3(*)", 2, 2, "asks for 3 standbys, and 2 are connected", True),
        ("*", 1, None, "asks for 1 standby, and 1 of any kind is connected", False),
        ("ANY 2 (*)", 1, None, "asks for 2 standbys, and 1 of any kind is connected", True),
    ],
)
def test_how_many_standbys_a_commit_waits_for(
    names: str, standbys: int, there: int | None, said: str | None, is_short: bool
) -> None:
    found = Synchronous(names, standbys, there, 0)
    assert found.is_short is is_short
    if said is None:
        assert found.wanted == 0
    else:
        assert str(found) == f"synchronous_standby_names = '{names}' {said}"
        assert found.what_to_do == (HASTEN if there is not None and not is_short else START_ONE)


PRIMARY = _Server("17.2", False)
STANDBY = _Server("17.2", True)


AWAY = UnreachableError("can't reach it")


def said(servers: dict[str, _Server | ReplayBufError]) -> list[tuple[str, str]]:
    return [(str(one.level), one.text) for one in findings(servers)]


def test_each_server_of_a_cluster_has_a_line() -> None:
    assert said({"a:1": PRIMARY, "b:2": STANDBY, "c:3": AWAY}) == [
        ("ok", "a:1 is a primary, PostgreSQL 17.2"),
        ("ok", "b:2 is a standby, PostgreSQL 17.2"),
        ("warning", "c:3 can't be used: can't reach it"),
    ]
    assert all(one.mend for one in findings({"a:1": PRIMARY, "c:3": AWAY}) if str(one.level) != "ok")


@pytest.mark.parametrize(
    ("servers", "level", "text"),
    [
        ({"a": PRIMARY, "b": PRIMARY}, "problem", "a and b both say that they are the primary"),
        ({"a": STANDBY, "b": STANDBY}, "problem", "none of the servers is a primary"),
    ],
)
def test_a_cluster_that_is_not_one_is_said(servers: dict[str, _Server | ReplayBufError], level: str, text: str) -> None:
    assert any(found == level and text in what for found, what in said(servers))


def test_servers_that_are_all_away_are_only_that() -> None:
    assert [level for level, _ in said({"a": AWAY, "b": AWAY})] == ["warning", "warning"]
