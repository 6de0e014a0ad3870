"""Calls that can't be right end with an error that says what is wrong, and with 2 where the call itself is."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.conftest import run

#: Calls, with `-` for the URL; their exit codes; and what is said.
MISTAKES = [
    ("", 2, ""),
    ("nope", 2, ""),
    ("checkpoint", 2, ""),
    ("export -", 2, "FILE"),
    ("stats --nope", 2, ""),
    ("stat run.db", 2, "No such command 'stat'. Did you mean 'stats'?"),
    ("exprot run.db", 2, "No such command 'exprot'. Did you mean 'export'?"),
    ("checkpoints run.db", 2, "No such command 'checkpoints'. Did you mean 'checkpoint'?"),
    *((f"{call} - --limit {limit}", 2, "--limit") for call in ("ls", "trace") for limit in (-1, "many", "²")),
    ("ls - --format=nl", 2, "none of text, json, csv"),
    *((f"ls - --where '{where}'", 1, "Error: a query is") for where in ("{", "[]", "3", "uid = 3")),
    ("""ls - --where '{"nope": 1}'""", 1, "Error: nope"),
    ("""ls - --where '{"staleness": {"$foo": 1}}'""", 1, "$foo"),
    ("ls - --order-by nope", 1, "order_by"),
    ("ls - --status nope", 1, "completed"),
    ("show -", 2, "UID"),
    ("show - abc", 2, "whole number"),
    ("show - 9999", 1, "Error: there is no group 9999"),
    ("show - 9999", 1, "there never was a group 9999: uids go from 1 to"),
    (f"show - {10**30}", 1, "there is no group"),
    ("show - 1 --worst 3", 2, "--worst"),
    ("show - 1 --task math", 2, "--task"),
    ("show - 1 --where '{}'", 2, "--where"),
    ("why - --status done", 1, "unknown status 'done'"),
    ("""why - --where '{"reward": {"$gte": "x"}}'""", 1, "reward.$gte"),
    ("why - --where 'reward > 1'", 1, "a query is JSON"),
    *(
        (f"trace - {of}", 2, "Invalid value for")
        for of in ("step", "step many", "uid", "worker", "steps 413", "nothing")
    ),
    (f"trace - step {10**30}", 2, "Invalid value for"),
    ("sql - ' '", 2, ""),
    ("sql - 'SELECT nope FROM groups'", 1, "nope"),
    *((f"sql - ' delete FROM {table}'", 1, "; `replaybuf rm` deletes groups") for table in ("groups", "rb_group")),
]


@pytest.mark.parametrize(("call", "code", "said"), MISTAKES)
def test_what_cannot_be_right_is_said(filled: str, call: str, code: int, said: str) -> None:
    stderr = run(*(filled if word == "-" else word for word in shlex.split(call)), code=code).stderr
    assert said in " ".join(stderr.split())


def test_a_url_in_the_place_of_a_query_shows_no_password(filled: str) -> None:
    assert "secret" not in run("ls", filled, "--where", "postgresql://me:secret@host/db", code=1).stderr
