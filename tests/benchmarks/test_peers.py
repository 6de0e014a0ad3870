"""`python -m benchmarks peers`: what needs no peer to be installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import turn
from benchmarks.peers.adapter import KINDS, SIZES, Place, make, stacked, unstacked
from benchmarks.peers.command import Result, main
from benchmarks.peers.environments import CannotInstallError, python_of
from benchmarks.peers.registry import ENVIRONMENTS, PEERS, Environment
from benchmarks.peers.tables import tables

ROWS = [("groups", "1K", "arrays"), ("lone", "1K", "arrays")]


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_only_needed_when_it_is_opened(name: str, tmp_path: Path) -> None:
    turn.adapter(PEERS[name].adapter, Place(str(tmp_path), "postgresql://nowhere/x" if PEERS[name].postgres else ""))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_peers_that_stack_give_all_values_back(size: str, kind: str) -> None:
    group = make(size, kind)
    unstacked_group = unstacked(stacked(group), as_lists=kind == "lists")
    assert [{name: _plain(value) for name, value in rollout.items()} for rollout in unstacked_group] == [
        {name: _plain(value) for name, value in rollout.items()} for rollout in group
    ]


@pytest.mark.parametrize("name", ["replaybuf-sqlite", "sqlite3", "fdatasync"])
async def test_a_turn(name: str, tmp_path: Path) -> None:
    """What is put is taken, whole, and the costs are told."""
    task = {"folder": str(tmp_path), "url": "", "server": None, "turn": "groups"}
    outcome = await turn._run(task | {"adapter": PEERS[name].adapter, "size": "1K", "kind": "lists", "count": 64})
    assert outcome["count"] == 64
    assert all(outcome[call]["seconds"] > 0 and outcome[call]["cpu"] > 0 for call in ("put", "take"))


async def test_groups_that_are_not_those_that_were_put_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peers.ours.ReplayBuf.tokens", lambda *_: 1)
    task = {"folder": str(tmp_path), "url": "", "server": None, "turn": "groups"}
    with pytest.raises(RuntimeError, match="not those that were put"):
        await turn._run(task | {"adapter": "ours:ReplayBuf", "size": "1K", "kind": "arrays", "count": 64})


def test_the_tables_name_what_is_missing() -> None:
    text = tables({"here": _result(), "away": _result({"all": "can't be installed: no wheel"})}, ROWS)
    assert "| Title | 500 (400..640) | 1,000 (1,000..1,000) |" in text
    assert "| 1 / 1 | - | - | - | all | note |" in text
    assert text.endswith("- away, not measured: can't be installed: no wheel")


def test_no_interpreter_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "old", Environment(("x==1",), 1, newest=9))
    monkeypatch.setenv("REPLAYBUF_PEERS_DIR", str(tmp_path))
    with pytest.raises(CannotInstallError, match=r"needs Python 3\.10 to 3\.9, of which none is on PATH"):
        python_of("old")


@pytest.mark.parametrize("wrong", [["--sizes", "3M"], ["--kinds", "sets"], ["--only", "redis"], ["--rounds", "-1"]])
def test_wrong_arguments_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(wrong)
    assert wrong[1] in capsys.readouterr().err


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _result(missing: dict[str, str] | None = None) -> Result:
    cost = {"cpu": 0.001, "server_cpu": 0.0}
    groups = [
        {"count": 64, "put": cost | {"seconds": s}, "take": cost | {"seconds": 0.064}} for s in (0.1, 0.16, 0.128)
    ]
    turns = {} if missing else {"groups 1K arrays": groups, "lone 1K arrays": [{"latencies": [0.001] * 9}]}
    return Result("Title", "all", "note", "", turns, missing or {})
