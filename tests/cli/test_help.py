"""Every command and option explains itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from replaybuf.cli.commands import COMMANDS as LISTED
from replaybuf.cli.commands import app
from replaybuf.storage.sql.inspection.writer import saved_buffer
from tests.cli.conftest import run


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


@pytest.mark.parametrize(("path", "command"), COMMANDS)
def test_help_has_examples(path: tuple[str, ...], command: Any) -> None:
    shown = run(*path, "--help").stdout
    assert f"\n    replaybuf {' '.join(path)} " in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(("path", "command"), COMMANDS)
def test_every_option_has_a_text_and_none_but_the_token_has_a_variable(path: tuple[str, ...], command: Any) -> None:
    for parameter in command.params:
        if parameter.name == "help":
            continue
        assert parameter.help
        if parameter.param_type_name == "option":
            [option] = parameter.opts
            assert parameter.envvar == ("REPLAYBUF_TOKEN" if option == "--token" else None)
        elif parameter.name == "url":
            assert parameter.envvar == "REPLAYBUF_URL"


def test_no_variable_of_a_program_steers_a_command(file: Path, tmp_path: Path) -> None:
    """Neither a config's, nor what Kubernetes sets for a service of our name; and none confirms a deletion."""
    env = {"REPLAYBUF_PAYLOADS": "/x", "REPLAYBUF_POLICY": "fifo", "REPLAYBUF_PORT": "tcp://10.0.0.1:80"}
    run("checkpoint", "save", file, tmp_path / "backup", env=env)
    assert saved_buffer(str(tmp_path / "backup" / "replaybuf.sqlite")) == ("default", None)
    assert run("serve", tmp_path / "gone.db", env=env, code=1).stderr.startswith("Error: there is no database")
    run("rm", file, env={"REPLAYBUF_ALL": "1", "REPLAYBUF_YES": "1"}, code=1)


# They go on until they are stopped, or print one report.
LIVE = [("demo",), ("serve",), ("watch",)]


@pytest.mark.parametrize(("path", "command"), [(path, command) for path, command in COMMANDS if path not in LIVE])
def test_every_command_has_every_format(path: tuple[str, ...], command: Any) -> None:
    assert "--format" in {option for parameter in command.params for option in parameter.opts}


def test_the_url_may_come_from_the_variable(filled: str) -> None:
    assert run("ls", "--format=csv", env={"REPLAYBUF_URL": filled}).stdout == run("ls", filled, "--format=csv").stdout


@pytest.mark.parametrize("path", ["stats", "why", "trace", "checkpoint ls", "export"])
def test_a_missing_url_names_the_variable(path: str) -> None:
    said = "Missing argument 'URL'. Name the database here, or in the environment variable REPLAYBUF_URL.\n"
    assert run(*path.split(), code=2).stderr.endswith(said)


def test_the_list_of_commands_says_what_each_is_for() -> None:
    shown = run("--help").stdout
    for name, (_, summary) in LISTED.items():
        assert f"\n  {name} " in shown
        assert summary in shown
    assert "..." not in run("checkpoint", "--help").stdout.partition("Commands:")[2]


def imported(*args: object) -> set[str]:
    """Return the modules that a command has imported in the end."""
    code = "import sys, json, atexit; from replaybuf.cli import main; sys.argv = ['replaybuf', *sys.argv[1:]]; "
    code += "atexit.register(lambda: print(json.dumps([*sys.modules]), file=sys.stderr)); main()"
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_the_list_of_commands_takes_none_of_their_imports() -> None:
    assert not imported("--help") & {"sqlalchemy", "numpy", "pydantic", "replaybuf.cli.stats"}


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "command",
    [["ls", "--task", "math", "--format=json"], ["show", 15], ["why", "math"], ["trace", "step", 42]],
    ids=lambda command: " ".join(map(str, command)),
)
def test_everyday_questions_take_no_slow_import(filled: str, command: list[object]) -> None:
    slow = {"sqlalchemy", "numpy", "asyncpg", "alembic", "msgpack", "asyncio", "replaybuf.values.codec"}
    slow |= {"replaybuf.buffer.replay_buffer", "replaybuf.produce", "replaybuf.values.rollouts.rollout"}
    assert not imported(*str(command[0]).split(), filled, *command[1:]) & slow
