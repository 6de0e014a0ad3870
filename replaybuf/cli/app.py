"""The group of all commands, and how they end: errors on one line; closed pipes and Ctrl-C quietly."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from replaybuf import __version__
from replaybuf.cli.options import URL_VARIABLE, Command
from replaybuf.errors import ReplayBufError
from replaybuf.redact import escape_line, redact_words

# click's, which typer has under names of its own, or in another package.
_UsageError: Any = typer.BadParameter.__base__

# What shells report for a program that a signal ended.
_BROKEN_PIPE = 128 + 13
_INTERRUPTED = 128 + 2

# Each command is a function in a module that is imported when the command is called, and what the list of commands says
# of it; `db` has subcommands.
COMMANDS = {
    "stats": ("replaybuf.cli.stats:stats", "Show how many groups there are of each task and status."),
    "metrics": ("replaybuf.cli.stats:metrics", "Print the figures of a database for Prometheus."),
    "ls": ("replaybuf.cli.ls:ls", "List groups without reading their payloads."),
    "why": ("replaybuf.cli.why:why", "Say why a trainer or a producer waits."),
    "show": ("replaybuf.cli.show:show", "Show a group with its responses, or the worst and the best ones."),
    "trace": ("replaybuf.cli.trace:trace", "Show what a train step was trained on, and the life of a group."),
    "watch": ("replaybuf.cli.watch:watch", "Watch a database, full screen: who waits and why."),
    "schema": ("replaybuf.cli.sql:schema", "List the views for SQL, with what their columns mean."),
    "sql": ("replaybuf.cli.sql:sql", "Run one SQL statement that only reads."),
    "save": ("replaybuf.cli.checkpoint:save", "Write a snapshot of a buffer, while the run goes on."),
    "resume": ("replaybuf.cli.checkpoint:resume", "Load a snapshot into a buffer that is empty."),
    "export": ("replaybuf.cli.files:export", "Write groups with their full texts and tokens to a file."),
    "import": ("replaybuf.cli.files:import_", "Put the groups of a file into a buffer, each exactly once."),
    "checkpoint": ("replaybuf.cli.checkpoint:app", "List, restore or drop step checkpoints."),
    "rm": ("replaybuf.cli.changes:rm", "Delete groups, by a query."),
    "requeue": ("replaybuf.cli.changes:requeue", "Bring back failed, filtered and expired groups, by a query."),
    "explain": ("replaybuf.cli.ls:explain", "Show a query as SQL, with its plan and the index that it uses."),
    "serve": ("replaybuf.cli.watch:serve", "Show a database in the browser."),
    "doctor": ("replaybuf.cli.doctor:doctor", "Check a database, and mend what can be mended."),
    "db": ("replaybuf.cli.doctor:app", "Show or upgrade the schema of a database."),
    "bench": ("replaybuf.cli.bench:bench", "Put load on a database, and say what it does under it."),
    "demo": ("replaybuf.demo.command:demo", "Train a small policy by GRPO through a replay buffer."),
}


class Commands(TyperGroup):
    """The commands, imported one by one, with exceptions turned into exit codes."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        if not isinstance(command, typer.Typer):
            function, command = command, typer.Typer(add_completion=False, rich_markup_mode=None)
            command.command(cmd_name, cls=Command)(function)
        built = typer.main.get_command(command)
        built.name = cmd_name
        return built

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            if near := difflib.get_close_matches(args[0], COMMANDS, n=1):
                error.message = f"{error.message.rstrip('.')}. Did you mean {near[0]!r}?"
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except _UsageError as error:  # it quotes what was typed, perhaps a URL in the wrong place
            error.message = redact_words(error.message)
            if not error.message and getattr(getattr(error, "param", None), "envvar", None) == URL_VARIABLE:
                error.message = f"Name the database here, or in the environment variable {URL_VARIABLE}."
            raise
        except ReplayBufError as error:
            typer.echo(f"Error: {escape_line(str(error))}", err=True)
            for note in filter(None, getattr(error, "__notes__", ())):
                typer.echo(note, err=True)  # the mistake in a query, escaped where it was made
            raise typer.Exit(1) from error
        except BrokenPipeError as error:
            # The interpreter flushes stdout once more at exit; that must not fail again.
            with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_BROKEN_PIPE) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(_INTERRUPTED) from error


app = typer.Typer(
    name="replaybuf",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def replaybuf(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Look into a replay buffer while a run goes on.

    URL is what the training config names, sqlite:///run.db or postgresql://user@host/database, or the path of a SQLite
    file. The environment variable REPLAYBUF_URL stands in for it. All commands but "demo", "bench", "resume", "import",
    "rm", "requeue", "checkpoint restore", "checkpoint drop", "db upgrade" and "doctor --repair" only read; they don't
    create a database and don't wait for the run.

    \b
    Examples:
      replaybuf stats run.db
      replaybuf ls run.db --task math --order-by -reward --limit 5
      replaybuf show run.db 17 --full
      replaybuf sql run.db "SELECT task_name, avg(reward) FROM groups GROUP BY 1"
    """


def run() -> None:
    """Run the command in this process's arguments."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a prompt in a script that the terminal can't show
    app(prog_name="replaybuf")
