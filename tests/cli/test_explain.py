"""`replaybuf ls --explain`."""

from __future__ import annotations

import json

from tests.cli.conftest import run, run_json


def test_a_draw_is_explained_with_its_index(filled: str) -> None:
    pinned, following = run_json("ls", filled, "--explain", "--task", "math", "--policy", "staleness")
    assert pinned["indexes"] == ["rb_group_by_pinned"]
    assert following["indexes"] == ["rb_group_by_step"]
    assert not following["sorts"]
    assert following["sentence"] == "reads groups by rb_group_by_step, without a sort"


def test_a_query_has_its_sql_and_parameters(filled: str) -> None:
    where = '{"tags.level": {"$in": [41, 51]}, "reward": {"$gte": 0.75}}'
    [found] = run_json("ls", filled, "--explain", "--where", where, "--order-by", "-reward", "--limit", 7)
    assert found["sql"].startswith("SELECT rb_group.uid")
    assert {0.75, 7} <= {value for value in found["parameters"] if not isinstance(value, list)}
    assert "41" in json.dumps(found["parameters"])
    assert found["sorts"]
    assert found["sentence"].startswith("scans all 13 groups of the database")
    assert found["sentence"].endswith("and sorts those that match")
    assert found["plan"]


def test_people_see_the_sentence_first(filled: str) -> None:
    shown = run("ls", filled, "--explain", "--task", "math", "--status", "completed").stdout
    assert [line for line in shown.splitlines() if line in ("SQL", "parameters", "plan")] == [
        "SQL",
        "parameters",
        "plan",
    ]
    assert shown.startswith(("Reads groups by ", "Scans "))


def test_a_mistake_is_shown_where_it_is(filled: str) -> None:
    said = run(
        "ls", filled, "--explain", "--where", '{"$and": [{"staleness": {"$gt": 1, "$lt": "x"}}]}', code=1
    ).stderr.splitlines()
    assert said[0].startswith("Error: $and[0].staleness.$lt: ")
    assert said[1][said[2].index("^") : said[2].rindex("^") + 1] == '"$lt": "x"'
    said = run("ls", filled, "--explain", "--where", '{"staleness": {"$gt": 1]', code=2).stderr.splitlines()
    assert "--where" in said[-3]
    assert said[-2][said[-1].index("^")] == "]"


def test_a_password_in_the_wrong_place_is_not_shown(filled: str) -> None:
    assert "secret" not in run("ls", filled, "--explain", "--where", "postgresql://me:secret@host/db", code=2).stderr


def test_odd_arguments_are_errors(filled: str) -> None:
    draw = ("--task", "math", "--policy", "fifo")
    assert "Error: " in run("ls", filled, "--explain", "--task", "\udcff", "--policy", "fifo", code=1).stderr
    assert run_json("ls", filled, "--explain", *draw, "--limit", 10**30)[0]["indexes"] == ["rb_group_in_order"]
