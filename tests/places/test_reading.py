"""Payloads that are kept apart, as those read them who don't have the buffer open: command, page, exports, doctor."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaybuf import RolloutState
from replaybuf.storage.places.folder import FolderStore
from replaybuf.storage.places.store import FILES
from replaybuf.storage.sql.inspection.group_payloads import decode_payload
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.web import group_pages
from replaybuf.web.server import AT_ONCE
from tests.cli.conftest import run, run_json
from tests.postgres import execute
from tests.stores import TASK, build, group
from tests.web.conftest import client_of

TEXT = "a long answer " * 100
#: Groups with arrays; the last one has none.
HEAVY = [1, 2, 3]


def heavy(number: int) -> list[RolloutState]:
    rollouts = group(number, 2, text=f"{number} {TEXT}")
    for rollout in rollouts:
        rollout.message = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Why? {TEXT}"}]
        rollout.extra_fields = {"experts": np.arange(10_000, dtype=np.int32) + number, "note": f"note {number}"}
    return rollouts


async def fill(url: str, folder: Path) -> None:
    folder.mkdir()  # noqa: ASYNC240
    async with build(url, payloads=str(folder), payload_threshold=20_000) as buffer:
        for number in HEAVY:
            await buffer.put(heavy(number), TASK)
        await buffer.put(group(4), TASK)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "payloads"


@pytest.fixture
def filled(shared_url: str, place: Path) -> str:
    asyncio.run(fill(shared_url, place))
    return shared_url


@pytest.fixture
def out_of_reach(filled: str, place: Path) -> Iterator[str]:
    """The database, whose folder for payloads isn't mounted."""
    place.rename(place.with_name("elsewhere"))
    yield filled
    place.with_name("elsewhere").rename(place)


def cut(place: Path) -> None:
    """Cut the end of the last payload."""
    last = max((place / FILES).iterdir(), key=lambda path: path.stat().st_mtime_ns)
    last.write_bytes(last.read_bytes()[:-1000])


def test_a_group_is_shown_with_its_arrays(filled: str) -> None:
    described = run_json("show", filled, 2, "--full")
    assert described["rollouts"][0]["extra_fields"]["experts"][:2] == [2, 3]
    result = run("show", filled, 2, "--full")
    assert f"2 {TEXT}".strip() in result.stdout
    assert "without" not in result.stderr


def test_without_the_folder_all_that_the_database_has_is_shown(out_of_reach: str, place: Path) -> None:
    result = run("show", out_of_reach, 2, "--full", "--format=json")
    described = json.loads(result.stdout)
    assert described["rollouts"][1]["extra_fields"] == {"experts": None, "note": "note 2"}
    assert described["rollouts"][1]["response"] == f"2 {TEXT}"
    assert result.stderr.count("\n") == 1
    assert f"group 2 is shown without its arrays: {place} isn't there" in result.stderr
    assert run("show", out_of_reach, 4, "--full").stderr == ""
    run("show", out_of_reach, 1)
    run("show", out_of_reach, "--best", 2)


def test_a_place_that_hangs_keeps_nothing_else_from_being_shown(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the texts of its groups nor, after some such requests, other pages."""
    answering = threading.Event()
    monkeypatch.setattr(FolderStore, "read_marker", lambda _: answering.wait())
    monkeypatch.setattr(group_pages, "_PLACE_SECONDS", 0.05)
    monkeypatch.setattr(decode_payload, "__defaults__", (0.05,))
    client = client_of(filled)
    texts = [client.get("/groups/2").text for _ in range(AT_ONCE + 1)]
    shown = run("show", filled, 2, "--full")
    answering.set()
    assert all("note 2" in text and "answer within 0.05 s" in text for text in texts)
    assert "note 2" in shown.stdout
    assert "group 2 is shown without its arrays: the place" in shown.stderr


def test_damaged_arrays_leave_texts(filled: str, place: Path) -> None:
    cut(place)
    result = run("show", filled, 3, "--full", "--format=json")
    assert json.loads(result.stdout)["rollouts"][0]["response"] == f"3 {TEXT}"
    assert "it was cut short" in result.stderr


def test_texts_are_found_by_sql(out_of_reach: str) -> None:
    """They are in the database."""
    ask = "SELECT full_response FROM rollouts WHERE uid = 2"
    assert run_json("sql", out_of_reach, ask) == 2 * [{"full_response": f"2 {TEXT}"}]
    [row] = run_json("sql", out_of_reach, "SELECT full_prompt, messages FROM groups WHERE uid = 2")
    assert row["full_prompt"] == f"Why? {TEXT}"
    assert "Be brief." in str(row["messages"])
    assert len(run_json("ls", out_of_reach)) == 4


def test_the_page_shows_a_group(filled: str, place: Path) -> None:
    client = client_of(filled)
    text = client.get("/groups/2").text
    assert "without its arrays" not in text
    assert TEXT.strip() in text
    place.rename(place.with_name("elsewhere"))
    text = client.get("/groups/2").text
    assert TEXT.strip() in text
    assert "note 2" in text
    assert "group 2 is shown without its arrays" in text


def test_an_export_has_all_or_says_why_not(filled: str, place: Path, tmp_path: Path) -> None:
    run("export", filled, tmp_path / "all.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(rows) == 7
    assert type(rows[0]["extra_fields"]["experts"]) is list
    place.rename(place.with_name("elsewhere"))
    result = run("export", filled, tmp_path / "none.jsonl", code=1)
    assert "mount it" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "none.jsonl").exists()
    into = f"sqlite:///{tmp_path}/into.db"
    run("import", into, tmp_path / "all.jsonl")
    assert run_json("show", into, 2, "--full")["rollouts"][0]["extra_fields"]["experts"][:2] == [2, 3]


def checksums(url: str, *options: str) -> dict[str, Any]:
    checks = json.loads(run("doctor", url, "--format=json", *options, code=None).stdout)
    return next(check for check in checks if check["check"] == "payloads")


def test_another_folder_in_the_stead_of_ours_is_no_damage(filled: str, place: Path, tmp_path: Path) -> None:
    place.rename(place.with_name("elsewhere"))
    asyncio.run(fill(f"sqlite:///{tmp_path}/other.db", place))
    assert "has other payloads than those" in run("show", filled, 2, "--full").stderr
    check = checksums(filled)
    assert (check["level"], check["repairable"]) == ("ok", False)
    assert "without what is out of reach" in check["text"]
    assert "mount or put back" in run("checkpoint", "save", filled, tmp_path / "snapshot", code=1).stderr


def test_a_place_that_the_database_lacks_is_no_damage(filled: str, place: Path) -> None:
    execute(filled, "DELETE FROM rb_place")
    check = checksums(filled, "--repair")
    assert (check["level"], check["repairable"]) == ("warning", False)
    assert "open the buffer with the payloads= of the run" in check["text"]
    assert len(run_json("ls", filled, "--status", "failed")) == 0


@pytest.mark.parametrize("value", [{"x": [np.arange(9000)]}, (np.arange(9000), "text"), {"in": np.arange(3)}])
def test_what_is_not_there_is_none(value: Any) -> None:
    codec = Codec(RolloutType(dict))
    split = codec.encode_split([{"text": "here", "value": value, "more": np.arange(5000)}])
    [row] = codec.decode_head(split.head)
    assert (row["text"], row["more"]) == ("here", None)
