"""Commands: help, mistakes, escapes, the database's."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replaybuf.cli.commands import COMMANDS as LISTED
from replaybuf.cli.commands import app
from replaybuf.cli.output import print_table
from replaybuf.common.redact import escape, escape_json, escape_line
from replaybuf.storage.sql import schema
from replaybuf.storage.sql.inspection.writer import saved_buffer
from replaybuf.storage.sql.schema import HEAD
from replaybuf.view.columns import Column
from tests.cli.conftest import Screen, run, run_json, run_on_screen
from tests.postgres import execute


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its path: ("checkpoint", "make")."""
    group = group or typer.main.get_command(app)
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = list(commands())


# They go on until they are stopped, or print one report.
LIVE = [("demo",), ("serve",), ("watch",)]


@pytest.mark.parametrize(("path", "command"), COMMANDS)
def test_help_has_examples_and_a_text_for_every_option_also_of_the_format(path: tuple[str, ...], command: Any) -> None:
    """None has a variable, but the URL."""
    assert path in LIVE or "--format" in {option for parameter in command.params for option in parameter.opts}
    page = run(*path, "--help").stdout
    assert f"\n    replaybuf {' '.join(path)} " in page
    assert "\x1b" not in page
    assert max(map(len, page.splitlines())) <= 80
    for parameter in command.params:
        if parameter.name == "help":
            continue
        assert parameter.help
        if parameter.param_type_name == "option":
            assert parameter.envvar is None
        elif parameter.name == "url":
            assert parameter.envvar == "REPLAYBUF_URL"


def test_no_variable_of_a_program_steers_a_command(file: Path, tmp_path: Path) -> None:
    """Neither a config's, nor what Kubernetes sets for a service of our name; and none confirms a deletion."""
    env = {"REPLAYBUF_PAYLOADS": "/x", "REPLAYBUF_POLICY": "fifo", "REPLAYBUF_PORT": "tcp://10.0.0.1:80"}
    run("checkpoint", "save", file, tmp_path / "backup", env=env)
    assert saved_buffer(tmp_path / "backup")[1:] == ("default", None)
    assert run("serve", tmp_path / "gone.db", env=env, code=1).stderr.startswith("Error: there is no database")
    run("rm", file, env={"REPLAYBUF_ALL": "1", "REPLAYBUF_YES": "1"}, code=1)


def test_the_url_may_come_from_the_variable(filled: str) -> None:
    rows = run("ls", "--format", "json", env={"REPLAYBUF_URL": filled}).stdout
    assert rows == run("ls", filled, "--format", "json").stdout


@pytest.mark.parametrize("path", ["stats", "why", "trace", "checkpoint ls", "export"])
def test_a_missing_url_names_the_variable(path: str) -> None:
    message = "Missing argument 'URL'. Name the database here, or in the environment variable REPLAYBUF_URL.\n"
    assert run(*path.split(), code=2).stderr.endswith(message)


def test_the_list_of_commands_says_what_each_is_for() -> None:
    page = run("--help").stdout
    for name, (_, summary) in LISTED.items():
        assert f"\n  {name} " in page
        assert summary in page
    assert "..." not in run("checkpoint", "--help").stdout.partition("Commands:")[2]


_IMPORTED = """
import json, sys
from replaybuf.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["replaybuf", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, arguments
    print(*sys.modules, file=sys.stderr)
"""


def test_everyday_questions_take_no_slow_import(filled_file: Path) -> None:
    """What each command has imported in the end, one after the other; the list of commands none of theirs."""
    slow = {"sqlalchemy", "numpy", "asyncpg", "alembic", "msgpack", "asyncio", "replaybuf.values.codec"}
    slow |= {"replaybuf.buffer.replay_buffer", "replaybuf.produce", "replaybuf.values.rollouts.rollout"}
    calls = ["--help", "show {} 15", "why {} math", "trace {} step 42"]
    words = json.dumps([call.format(filled_file).split() for call in calls])
    process = subprocess.run([sys.executable, "-c", _IMPORTED, words], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    listing, *questions = [set(line.split()) for line in process.stderr.splitlines()]
    assert not listing & {"sqlalchemy", "numpy", "pydantic", "replaybuf.cli.stats"}
    assert [modules & slow for modules in questions] == [set()] * 3


#: Calls, with `-` for the URL; their exit codes; and what is said.
MISTAKES = [
    ("", 2, ""),
    ("nope", 2, ""),
    ("checkpoint", 2, ""),
    ("export -", 2, "FILE"),
    ("stats --nope", 2, ""),
    ("checkpoint run.db", 2, "No such command 'run.db'"),
    *((f"{call} - --limit {limit}", 2, "--limit") for call in ("ls", "trace") for limit in (-1, "many", "²")),
    ("ls - --format=nl", 2, "none of text, json"),
    *((f"ls - --where '{where}'", 1, "Error: a query is") for where in ("{", "[]", "3", "uid = 3")),
    ("""ls - --where '{"nope": 1}'""", 1, "Error: nope"),
    ("""ls - --where '{"staleness": {"$foo": 1}}'""", 1, "$foo"),
    ("ls - --order-by nope", 1, "order_by"),
    ("ls - --status nope", 1, "completed"),
    ("show -", 2, "UID"),
    ("show - abc", 2, "valid integer"),
    ("show - 9999", 1, "Error: there is no group 9999"),
    ("show - 9999", 1, ": uids go from 1 to"),
    (f"show - {10**30}", 1, "there is no group"),
    ("show - 1 --worst 3", 2, "--worst"),
    ("show - 1 --task math", 2, "--task"),
    ("show - 1 --where '{}'", 2, "--where"),
    ("""why - --where '{"reward": {"$gte": "x"}}'""", 1, "reward.$gte"),
    ("why - --where 'reward > 1'", 1, "a query is JSON"),
    *(
        (f"trace - {words}", 2, "Invalid value for")
        for words in ("step", "step many", "uid", "worker", "steps 413", "nothing")
    ),
    (f"trace - step {10**30}", 2, "Invalid value for"),
    ("sql - ' '", 2, ""),
    ("sql - 'SELECT nope FROM groups'", 1, "nope"),
]


@pytest.mark.parametrize(("call", "code", "said"), MISTAKES)
def test_what_cannot_be_right_is_said(filled: str, call: str, code: int, said: str) -> None:
    stderr = run(*(filled if word == "-" else word for word in shlex.split(call)), code=code).stderr
    assert said in " ".join(stderr.split())


def test_a_url_in_the_place_of_a_query_shows_no_password(filled: str) -> None:
    assert "secret" not in run("ls", filled, "--where", "postgresql://me:secret@host/db", code=1).stderr


UNSAFE = ["\x1b", "\x07", "\x00", "\r", "\x7f", "\x9b", "\u202e", "\u2066", "\ufeff", "\u2028", "\U000e0041", "\ud800"]


@pytest.mark.parametrize("character", UNSAFE)
def test_unsafe_characters_become_escapes(character: str) -> None:
    escaped = escape(f"a{character}b")
    assert escaped.isascii()
    assert escaped.isprintable()
    assert escaped.startswith("a\\")


@pytest.mark.parametrize("text", ["plain", "[red]x[/red]", "\\nabla", "你好", "é", "👩‍🚀", "می‌خواهم", "x²"])
def test_all_else_stays(text: str) -> None:
    assert escape(text) == text


def test_a_line_has_no_newlines() -> None:
    assert escape_line(" a\n   b\r\nc\x1b ") == "a b c\\x1b"


@settings(max_examples=30)
@given(st.text(st.sampled_from(UNSAFE) | st.characters()))
def test_json_keeps_its_meaning(text: str) -> None:
    encoded = escape_json(json.dumps([text], ensure_ascii=False))
    assert json.loads(encoded) == [text]
    assert not any(character in encoded for character in UNSAFE)


@pytest.mark.parametrize(
    "command",
    [
        *(("stats",), ("ls",), ("show", "1"), ("show", "1", "--full"), ("why", "--size", "9")),
        *(("trace",), ("trace", "step", "1"), ("trace", "uid", "1")),
        ("sql", "SELECT prompt, tags, task_name FROM groups"),
    ],
)
@pytest.mark.parametrize("format", ["", "--format=json"])
def test_no_command_prints_an_unsafe_character(hostile: str, command: tuple[str, ...], format: str) -> None:
    args = [command[0], hostile, *command[1:], *([format] if format else [])]
    stdout = run(*args).stdout
    assert not [character for character in UNSAFE if character in stdout]
    assert "not markup" in stdout


@pytest.mark.parametrize("hostile", ["sqlite"], indirect=True)
def test_a_terminal_gets_no_escapes_in_json(hostile: str) -> None:
    output = run_on_screen(80, "ls", hostile, "--format=json")
    assert "not markup" in output
    assert not [character for character in UNSAFE if character in output]


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
def test_a_terminal_gets_colours(filled: str) -> None:
    assert "\x1b[32mcompleted" in run_on_screen(80, "ls", filled)


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
def test_sentences_are_wrapped_at_words(filled: str) -> None:
    words = run("why", filled, "math", "--size", 64).stdout.splitlines()[0].split()
    lines = run_on_screen(40, "why", filled, "math", "--size", 64).splitlines()
    text = "\n".join(lines).partition("\n\n")[0]
    assert text.split() == words
    assert max(map(len, text.splitlines())) <= 40


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=9), st.integers(20, 200))
@example([(1, False), (1, False), (6, False), *[(11, True)] * 3, (60, False), (60, False), (12, True)], 184)
def test_a_table_fits_and_its_numbers_are_never_cut(columns: list[tuple[int, bool]], width: int) -> None:
    """Else each field has a line of its own."""
    kinds = [Column(f"c{n}", "h", "text" if is_text else "word") for n, (_, is_text) in enumerate(columns)]
    row = {f"c{n}": ("t" if is_text else "9") * length for n, (length, is_text) in enumerate(columns)}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed := Screen()):
        patch.setenv("COLUMNS", str(width))
        print_table([row], kinds)
    *_, last = lines = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    if "─[ 1 ]" not in printed.getvalue():
        for (length, is_text), cell in zip(columns, last.split(), strict=True):
            assert len(cell) == length or (is_text and len(cell) >= min(length, 10) and cell.endswith("…"))


def test_upgrade_makes_the_tables_in_an_empty_database_and_then_changes_nothing(empty: str) -> None:
    [row] = run_json("doctor", empty, "--upgrade")
    assert (row["before"], row["after"]) == (None, HEAD)
    assert run_json("ls", empty) == []
    repeated = run("doctor", empty, "--upgrade")
    assert repeated.stdout.splitlines()[-1].split() == [HEAD, HEAD]
    assert repeated.stderr == "it was up to date already\n"


def test_an_older_schema_is_to_be_upgraded_and_a_newer_one_is_refused(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("doctor", empty, "--upgrade")
    execute(empty, "UPDATE rb_version SET version_num = '9999'")
    assert "9999" in run("doctor", empty, "--upgrade", code=1).stderr
    monkeypatch.setattr(schema, "REVISIONS", ("0000", HEAD))
    execute(empty, "UPDATE rb_version SET version_num = '0000'")
    assert "--upgrade" in run("ls", empty, code=1).stderr


def test_upgrade_leaves_other_databases_alone(empty: str) -> None:
    execute(empty, "CREATE TABLE other (a int)")
    assert "belongs to something else" in run("doctor", empty, "--upgrade", code=1).stderr


def test_arguments_that_are_no_text_are_refused(empty: str) -> None:
    for arguments in (["stats", "a\udcff.db"], ["doctor", "a\udcff.db"], ["sql", empty, "SELECT '\udcff'"]):
        assert "isn't text in UTF-8" in run(*arguments, code=1).stderr
