"""The group of all commands, their errors (on one line, with exit code 1), and shared options."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from replaybuf import __version__
from replaybuf.cli.output import FORMATS, Output
from replaybuf.common.progress import OnProgress, Progress, progress_bar
from replaybuf.common.redact import escape_line, redact, redact_words
from replaybuf.errors import InputError, ReplayBufError
from replaybuf.storage.sql.inspection.group_metadata import choose
from replaybuf.storage.sql.inspection.reader import Reader, open_reader

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from replaybuf.storage.sql.backend import SQLStorage
    from replaybuf.values.rollouts.statuses import Status

# click's class, whose module depends on the version of typer.
_UsageError: Any = typer.BadParameter.__base__

# Each command: the module and function, imported when the command is called, and its line in the list of commands.
COMMANDS = {
    "stats": ("replaybuf.cli.stats:stats", "Show how many groups there are of each task and status."),
    "ls": ("replaybuf.cli.groups:ls", "List groups without reading their payloads."),
    "why": ("replaybuf.cli.why:why", "Say why a trainer or a producer waits."),
    "show": ("replaybuf.cli.show:show", "Show a group with its responses, or the worst and the best ones."),
    "trace": ("replaybuf.cli.trace:trace", "Show what a train step was trained on, and the life of a group."),
    "watch": ("replaybuf.cli.stats:watch", "Watch a database, full screen: who waits and why."),
    "sql": ("replaybuf.cli.groups:sql", "Run one SQL statement that only reads, or list the views."),
    "export": ("replaybuf.cli.export_import:export", "Write groups with their full texts and tokens to a file."),
    "import": ("replaybuf.cli.export_import:import_", "Put the groups of a file into a buffer, each exactly once."),
    "checkpoint": ("replaybuf.cli.checkpoint:app", "Step checkpoints, and snapshots of a buffer in files."),
    "rm": ("replaybuf.cli.groups:rm", "Delete groups, by a query."),
    "requeue": ("replaybuf.cli.groups:requeue", "Bring back failed, filtered and expired groups, by a query."),
    "serve": ("replaybuf.cli.stats:serve", "Show a database in the browser."),
    "doctor": ("replaybuf.cli.doctor.examine:doctor", "Check a database, mend it, or upgrade its schema."),
    "bench": ("replaybuf.cli.bench:bench", "Put load on a database, and say what it does under it."),
    "demo": ("replaybuf.cli.demo:demo", "Train a small policy by GRPO through a replay buffer."),
}


class Commands(TyperGroup):
    """The commands, imported one by one, with our errors on one line."""

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
            command.command(cmd_name)(function)
        click_command = typer.main.get_command(command)
        click_command.name = cmd_name
        return click_command

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except _UsageError as error:  # its message quotes arguments, perhaps a URL in the wrong place
            error.message = redact_words(error.message)
            if not error.message and getattr(getattr(error, "param", None), "envvar", None) == URL_VARIABLE:
                error.message = f"Name the database here, or in the environment variable {URL_VARIABLE}."
            raise
        except ReplayBufError as error:
            typer.echo(f"Error: {escape_line(str(error))}", err=True)
            raise typer.Exit(1) from error
        except UnicodeEncodeError as error:  # (which has the text, perhaps a URL)
            typer.echo("Error: an argument, or a variable that stands for one, isn't text in UTF-8", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    name="replaybuf",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


def _print_version(requested: bool) -> None:
    if requested:
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
    file. The environment variable REPLAYBUF_URL stands in for it where nothing else is named. All commands but "demo",
    "bench", "import", "rm", "requeue", "checkpoint" (make, restore, drop, resume) and "doctor" (--repair, --probe,
    --upgrade, --take-over) only read; they don't create a database and don't wait for the run.

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
    signal.signal(signal.SIGTERM, _terminate)
    app(prog_name="replaybuf")


def _terminate(number: int, _: object) -> None:
    """End by an exception, so that commands leave nothing behind, and the terminal as it was."""
    sys.exit(128 + number)


# Arguments and options that commands share. None of the options has an environment variable, so that a program's
# settings steer no command.


URL_VARIABLE = "REPLAYBUF_URL"

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        envvar=URL_VARIABLE,
        help="sqlite:///FILE, postgresql://user@host/database, or the path of a SQLite file.",
        show_default=False,
    ),
]


def option(name: str, help: str, **settings: Any) -> Any:
    """Return an option. A number's metavar is N."""
    if "min" in settings:
        settings.setdefault("metavar", "N")
    return typer.Option(name, help=help, show_envvar=False, **settings)


def buffer_option(help: str) -> Any:
    """Return the option --buffer."""
    return option("--buffer", help, metavar="NAME")


Buffer = Annotated[str | None, buffer_option("Only this buffer of the database; all unless given.")]
OneBuffer = Annotated[
    str | None, buffer_option("This buffer of the database; else the only one, or the one named default.")
]


# Options that select groups.
def _unless_blank(text: str | None) -> str | None:
    return text if text and text.strip() else None


Where = Annotated[
    str | None,
    option("--where", 'A query: {"reward": {"$gte": 0.9}, "tags.level": 3}.', metavar="QUERY", callback=_unless_blank),
]
OfTask = Annotated[str | None, option("--task", "Only groups of this task.", metavar="NAME")]
_STATUSES = "init, completed, aborted, expired, failed, filtered, archived, or filling (rollouts that wait for others)"
OfStatus = Annotated[str | None, option("--status", f"Only groups of this status: {_STATUSES}.", metavar="STATUS")]
OrderBy = Annotated[
    list[str] | None, option("--order-by", "A field; -FIELD is descending. May be repeated.", metavar="FIELD")
]
Limit = Annotated[str, option("--limit", "At most so many groups, or all.", metavar="N|all")]


def argument(name: str, help: str) -> Any:
    """Return an argument that comes after a URL."""
    return typer.Argument(metavar=name, help=help, show_default=False)


def _output(format: str | Output) -> Output:
    """Parse --format. Raises a usage error."""
    if isinstance(format, str) and format not in FORMATS:
        raise typer.BadParameter(f"{format!r:.100} is none of {', '.join(FORMATS)}.")
    return Output(format) if isinstance(format, str) else format


#: The default of --format.
TEXT = Output()
Out = Annotated[Output, option("--format", "text or json.", metavar="FORMAT", parser=_output, show_default=False)]


#: The option --yes of commands that ask for confirmation.
YES = option("--yes", "Don't ask.")


def ask(question: str, *, yes: bool) -> None:
    """Ask for confirmation on stderr, unless `yes`. Raises InputError for another answer, or EOF."""
    if yes:
        return
    try:
        if typer.confirm(escape_line(question), err=True):
            return
    except typer.Abort:
        typer.echo(err=True)
        raise InputError("nothing was done: nobody answered; give --yes to do it without asking") from None
    raise InputError("nothing was done")


def open_buffer(url: str, buffer: str | None) -> tuple[Reader, str]:
    """Return the reader of a database, and the name of this buffer, or of the only or the default one."""
    reader = open_reader(url)
    return reader, reader.read(lambda tx: choose(tx, buffer))


T = TypeVar("T")


def with_bar(title: str, work: Callable[[OnProgress], T]) -> tuple[T, Progress]:
    """Run `work(on_progress)` with a progress bar. Return its result and the last progress."""
    last = Progress(0, 0, 0)
    with progress_bar(title) as bar:

        def tell(progress: Progress) -> None:
            nonlocal last
            last = progress
            bar(progress.groups, progress.total)

        return work(tell), last


def on_storage(url: str | URL, name: str, call: Callable[[SQLStorage], Awaitable[T]], **settings: Any) -> T:
    """Open a buffer's storage, return the result of `call(storage)`, and close it. Imports the modules for writing.

    The run's limits aren't known here, so its groups and history aren't maintained.
    """
    import asyncio

    from replaybuf.storage.sql.backend import SQLStorage
    from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS

    async def run() -> T:
        text = url if isinstance(url, str) else url.render_as_string(hide_password=False)
        storage = SQLStorage(text, AS_DICTS, name=name, maintains=False, **settings)
        try:
            return await call(storage)
        finally:
            await storage.close()

    return asyncio.run(run())


def status_of(text: str | None) -> Status | None:
    """Return the status of this name; None for None. Raises InputError."""
    from replaybuf.values.rollouts.statuses import OUR_STATUSES, Status

    status = None if text is None else OUR_STATUSES.get(text)
    if text is not None and status is None:
        raise InputError(f"unknown status {redact(text)!r:.100}; there are {', '.join(Status)}")
    return status


#: More than any database holds; one more can still be stored by it.
_HIGHEST_NUMBER = 2**62


def read_limit(text: str) -> int | None:
    """Parse --limit: a number, or `all`, which is None. Raises a usage error."""
    if text == "all":
        return None
    if not text.isascii() or not text.isdecimal():
        raise typer.BadParameter(
            f"{redact(text)!r:.100} is neither a number of at least 0 nor all.", param_hint="--limit"
        )
    return min(int(text), _HIGHEST_NUMBER)
