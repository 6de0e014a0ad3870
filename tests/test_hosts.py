"""URLs with several hosts, and which of their servers is chosen: functions of values."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from replaybuf.errors import AccessError, UnreachableError
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.locks import next_stamp
from replaybuf.storage.sql.engine.postgres_connect import ServerState
from replaybuf.storage.sql.engine.postgres_servers import _MOST_STAMPS, Servers, choose
from replaybuf.storage.sql.engine.urls import Host, hosts_of, parse_url, public_url
from tests.stores import build

pytestmark = pytest.mark.fast
A, B = Host("a", 5432), Host("b", 5433)


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://a:5432,b:5433/rl", [A, B]),
        ("postgresql://user:p%40w,x@a:5432,b:5433/rl?sslmode=require", [A, B]),
        ("postgresql://user@a,b/rl", [Host("a"), Host("b")]),
        ("postgres://user@[::1]:5432,[fe80::1]/rl", [Host("::1", 5432), Host("fe80::1")]),
        ("postgresql+asyncpg:///rl?host=a:5432,b:5433", [A, B]),
        ("postgresql://user@/rl?host=a:5432&host=b:5433", [A, B]),
        ("postgresql://user@%2Ftmp%2Fa,b:5433", [Host("/tmp/a"), B]),
        ("postgresql://user@a:5432/rl", []),
        ("postgresql:///rl?host=/tmp/a", []),
    ],
)
def test_several_hosts_are_read_in_all_their_forms(url: str, hosts: list[Host]) -> None:
    parsed = parse_url(url)
    assert hosts_of(parsed) == hosts
    reparsed = parse_url(parsed.render_as_string(hide_password=False))
    assert (hosts_of(reparsed), reparsed.password, reparsed.database) == (hosts, parsed.password, parsed.database)
    if hosts:
        public = public_url(parsed)
        assert parsed.password is None or (":***@" in public and "p%40w" not in public)
        assert hosts_of(parse_url(public)) == hosts


def server(timeline: int | None, *, started: int = 1) -> ServerState:
    return ServerState(timeline, timeline is None, datetime(2026, 1, started), 1)


FOLLOWED, AWAY = server(2, started=2), "does not answer"


@pytest.mark.parametrize(
    ("found", "followed", "chosen"),
    [
        ({A: server(1), B: server(2)}, None, B),
        ({B: server(2), A: server(1)}, None, B),
        ({A: server(2), B: server(2)}, None, A),  # two addresses of one server
        ({A: server(2), B: server(2, started=2)}, FOLLOWED, B),
        ({A: AWAY, B: server(3)}, FOLLOWED, B),
    ],
)
def test_the_primary_with_the_highest_timeline_is_followed(
    found: dict[Host | None, ServerState | str], followed: ServerState | None, chosen: Host
) -> None:
    assert choose(found, followed, writes=True) == chosen


@pytest.mark.parametrize(
    ("found", "followed", "error", "text"),
    [
        (
            {A: server(1), B: AWAY},
            FOLLOWED,
            UnreachableError,
            r"a:5432 is an old primary \(timeline 1; this process follows timeline 2",
        ),
        ({A: server(2), B: server(2, started=2)}, None, UnreachableError, "a:5432 and b:5433 both say that they are"),
        ({A: server(None)}, None, AccessError, "a:5432 is a standby, which takes no writes; name the primary"),
        ({A: server(None), B: AWAY}, None, UnreachableError, "no primary can be reached: a:5432 is a standby"),
    ],
)
def test_who_writes_is_refused_where_there_is_not_one_primary(
    found: dict[Host | None, ServerState | str], followed: ServerState | None, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        choose(found, followed, writes=True)


def test_readers_take_the_newest_primary_wherever_it_is_in_the_url() -> None:
    old, standby, new = (A, server(1)), (B, server(None)), (Host("c", 5434), server(2))
    for answers in ([old, standby, new], [standby, new, old], [new, old, standby]):
        assert choose(dict(answers), None, writes=False) is new[0]
    assert choose({A: AWAY, B: server(None)}, None, writes=False) is B


def test_the_last_commits_of_the_latest_connections_stand_for_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    servers, stamps = Servers(Access(parse_url("postgresql://a/rl"))), [next_stamp(None) for _ in range(_MOST_STAMPS)]
    latest = [next_stamp(stamps[0]), next_stamp(None)]
    for stamp in stamps + latest:
        servers.note_commit(stamp)
    assert servers.marks == dict([*stamps[2:], *latest])
    monkeypatch.setattr(time, "time", lambda: latest[1].number / 1_000_000 + 7 * 86_400)
    assert servers.marks == {}  # whose rows may have been deleted


async def test_a_password_file_in_another_encoding_is_named_without_its_content(tmp_path: Path) -> None:
    (tmp_path / "pgpass").write_bytes(b"localhost:5999:db:u:s\xe9cret")
    (tmp_path / "pgpass").chmod(0o600)
    with pytest.raises(UnreachableError, match="no text in UTF-8") as caught:
        async with build(f"postgresql://u@localhost:5999/db?passfile={tmp_path}/pgpass", reconnect_timeout=0):
            pass
    assert caught.value.__cause__ is None
