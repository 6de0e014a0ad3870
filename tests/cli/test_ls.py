"""`replaybuf ls`."""

from __future__ import annotations

import json
import re

import pytest

from replaybuf import Status
from replaybuf.cli import output
from replaybuf.rules.query import FIELDS
from replaybuf.storage.sql.inspection.user_sql import VIEW_COLUMNS
from tests.cli.conftest import run, run_json


def uids(*args: object) -> list[int]:
    return [row["uid"] for row in run_json("ls", *args)]


def test_where_is_the_query_language(filled: str) -> None:
    rows = run_json("ls", filled, "--where", '{"tags.level": {"$in": [1, 2]}, "staleness": {"$lte": 2}}')
    assert rows
    assert all(row["tags"]["level"] < 3 and row["staleness"] <= 2 for row in rows)


def test_limit_bounds_the_list_and_all_does_not(filled: str) -> None:
    for limit, length in (("0", 0), ("2", 2), ("all", 13), ("1" + "0" * 30, 13)):
        assert len(uids(filled, "--limit", limit)) == length
        exported = run("export", filled, "-", "--limit", limit).stdout
        assert len({json.loads(row)["group.uid"] for row in exported.splitlines()}) == length


def test_what_nobody_matches_is_an_empty_list(filled: str) -> None:
    assert run("ls", filled, "--task", "nope", "--format=json").stdout == "[]\n"
    nothing = run("ls", filled, "--task", "cod")
    unknown = "nothing was ever put into this task; there are the tasks code and math\n"
    assert (nothing.stdout, nothing.stderr) == ("", f"no such groups: {unknown}")
    assert run("show", filled, "--worst", 1, "--task", "cod").stderr == unknown


def test_the_worker_of_each_group_is_listed_and_all_fields_are_named(filled: str) -> None:
    assert "gpu-node-7" in run("ls", filled).stdout
    words = set(re.split(r"[^a-z_]+", run("ls", "--help").stdout))
    assert words.issuperset({*FIELDS, *Status})
    listed = next(one.meaning for one in VIEW_COLUMNS["groups"].columns if one.name == "status")
    assert {*listed.replace("`", "").split(", ")} == {*Status}


def test_both_databases_give_the_same_types(filled: str) -> None:
    [row] = run_json("ls", filled, "--order-by", "-uid", "--limit", 1)
    created_at, size = row.pop("created_at"), row.pop("bytes")
    assert created_at.endswith("Z")
    assert size > 5000
    assert row == {
        "worker": "gpu-node-7",
        "put_step": 42,
        "leased_by": None,
        "trained_step": None,
        "uid": 15,
        "buffer": "default",
        "task_name": "math",
        "status": "completed",
        "staleness": 1,
        "reward": 0.75,
        "priority": 1.0,
        "times_sampled": 0,
        "leased_until": None,
        "archived_at": None,
        "deliveries": 0,
        "rollouts": 4,
        "prompt_tokens": 160,
        "response_tokens": row["response_tokens"],
        "finish_reasons": row["finish_reasons"],
        "key": None,
        "group_size": None,
        "group_index": None,
        "tags": {"level": 1},
        "error": None,
        "prompt": "Find all primes p such that p^2 + 15 is a perfect square.",
        "response": row["response"],
    }


def test_leases_are_shown_with_the_time_that_is_left(busy: str) -> None:
    header, _, *lines = run("ls", busy, "--buffer", "default").stdout.splitlines()
    assert header.split()[:6] == ["uid", "task", "status", "leased", "deliveries", "stale"]
    assert "  -           0  " in lines[0]
    assert "  in 1.0h           1  " in lines[1]
    assert " ago           1  " in lines[2]
    assert "  over " in lines[2]
    assert [row["leased_until"] is not None for row in run_json("ls", busy, "--buffer", "default")] == [
        *(False, True, True),
        *(False, False),
    ]


def test_one_buffer_of_several(busy: str) -> None:
    assert len(uids(busy)) == 6
    assert len(uids(busy, "--buffer", "eval")) == 1
    assert run("ls", busy).stdout.split()[1] == "buffer"
    assert run("ls", busy, "--buffer", "eval").stdout.split()[1] == "task"
    assert run("ls", busy, "--limit", 1, "--buffer", "default").stderr == "1 of 5 groups; --limit all shows all\n"
    assert run("ls", busy, "--buffer", "eval", "--task", "x").stderr == (
        "no such groups: nothing was ever put into this task; there is the task math\n"
    )


def test_on_a_narrow_terminal_texts_give_way(busy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_UNLIMITED_WIDTH", 80)
    result = run("ls", busy)
    assert len(result.stdout.splitlines()) == 2 + 6
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert result.stderr.startswith("too narrow for: ")
