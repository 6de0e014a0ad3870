"""Arguments and options that commands share. Each has an environment variable; --help tells of few."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from replaybuf.cli.output import Format, Output
from replaybuf.errors import InputError
from replaybuf.progress import OnProgress, Progress, progress_bar
from replaybuf.redact import escape_line, redact

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from replaybuf.codec.payload import Codec
    from replaybuf.rollouts.statuses import Status
    from replaybuf.storage.sql.backend import SQLStorage

URL_VARIABLE = "REPLAYBUF_URL"
_NAME_VARIABLE = "REPLAYBUF_NAME"
_MISSING = f"it is missing. It comes after the URL, which may be in the environment variable {URL_VARIABLE} instead."

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        envvar=URL_VARIABLE,
        help="sqlite:///FILE, postgresql://user@host/database, or the path of a SQLite file.",
        show_default=False,
    ),
]


class Command(TyperCommand):
    """A command with a usage line that is true: the URL may come from its variable, a FILE after it may not."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        names = [f"[{one.metavar}]" if one.envvar else str(one.metavar) for one in arguments]
        return [str(self.options_metavar), *names]


def option(*names: str, help: str, variable: str | None = None, **settings: Any) -> Any:
    """Return an option with its environment variable: REPLAYBUF_ORDER_BY for --order-by."""
    variable = variable or "REPLAYBUF_" + names[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(*names, help=help, envvar=variable, show_envvar=variable == _NAME_VARIABLE, **settings)


def buffer_option(help: str) -> Any:
    """Return the option --buffer, with the environment variable of configs."""
    return option("--buffer", metavar="NAME", variable=_NAME_VARIABLE, help=help)


Buffer = Annotated[str | None, buffer_option("Only this buffer of the database; all unless given.")]
OneBuffer = Annotated[
    str | None, buffer_option("This buffer of the database; else the only one, or the one named default.")
]

# What chooses groups, for all commands that take a choice of them.
Where = Annotated[
    str | None, option("--where", metavar="QUERY", help='A query: {"reward": {"$gte": 0.9}, "tags.level": 3}.')
]
OfTask = Annotated[str | None, option("--task", metavar="NAME", help="Only groups of this task.")]
OfStatus = Annotated[
    str | None, option("--status", metavar="STATUS", help="Only groups of this status: completed, expired, ...")
]
OrderBy = Annotated[
    list[str] | None, option("--order-by", metavar="FIELD", help="A field; -FIELD is descending. May be repeated.")
]
Limit = Annotated[int, option("--limit", metavar="N", min=0, help="At most so many groups; 0 for all.")]


def file_argument(help: str) -> Any:
    """Return the argument FILE, which comes after a URL (`url_and`)."""
    return typer.Argument(metavar="FILE", help=help, show_default=False)


_FORMATS: dict[str, tuple[Format, Any]] = {
    "as_table": ("table", Annotated[bool, option("--table", help="Print a table: so it is unless told otherwise.")]),
    "as_json": ("json", Annotated[bool, option("--json", help="Print JSON.")]),
    "as_nl": ("nl", Annotated[bool, option("--nl", help="Print one JSON object a line.")]),
    "as_csv": ("csv", Annotated[bool, option("--csv", help="Print CSV with a header.")]),
}


def listing(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `output: Output` by the options --table, --json, --nl and --csv."""
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)

    @functools.wraps(command)
    def wrapper(ctx: typer.Context, **values: Any) -> None:
        chosen = [name for name in _FORMATS if values.pop(name)]
        if len(chosen) > 1:
            # A variable is only a default: options on the command line override it.
            chosen = [name for name in chosen if _is_typed(ctx, name)] or chosen[:1]
        if len(chosen) > 1:
            raise typer.BadParameter("choose one of --table, --json, --nl and --csv", ctx=ctx)
        command(output=Output(_FORMATS[chosen[0]][0] if chosen else "table", asked=bool(chosen)), **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [
        parameter.replace(annotation=hints[name], kind=keyword)
        for name, parameter in signature.parameters.items()
        if name != "output"
    ]
    shared = [inspect.Parameter(name, keyword, default=False, annotation=hint) for name, (_, hint) in _FORMATS.items()]
    context = inspect.Parameter("ctx", keyword, annotation=typer.Context)
    parameters = [context, *own, *shared]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _is_typed(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def url_and(url: str, value: str | None, name: str) -> tuple[str, str]:
    """Return the arguments `URL VALUE`; a single one is the value if REPLAYBUF_URL is set."""
    if value is not None:
        return url, value
    variable = os.environ.get(URL_VARIABLE)
    if not variable or url == variable:
        raise typer.BadParameter(_MISSING, param_hint=name)
    return variable, url


def url_and_uids(url: str, uids: list[str] | None) -> tuple[str, list[str]]:
    """Return the arguments `URL UID...`; the first is a uid, too, if REPLAYBUF_URL is set and it is a number."""
    variable = os.environ.get(URL_VARIABLE)
    if variable and url != variable and url.isdigit():
        return variable, [url, *(uids or [])]
    if not uids:
        raise typer.BadParameter(f"{_MISSING} --worst N and --best N choose the rollouts instead.", param_hint="UID")
    return url, uids


#: The option --yes of commands that ask.
YES = option("--yes", help="Don't ask.")


def ask(question: str, *, yes: bool) -> None:
    """Ask a question on stderr, unless `yes`. Raises InputError when the answer is no, or nobody answers."""
    if yes:
        return
    try:
        if typer.confirm(escape_line(question), err=True):
            return
    except typer.Abort:
        typer.echo(err=True)
        raise InputError("nothing was done: nobody answered; give --yes to do it without asking") from None
    raise InputError("nothing was done")


T = TypeVar("T")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def with_bar(what: str, work: Callable[[OnProgress], T], *, counting: str = "") -> tuple[T, Progress]:
    """Run `work(tell)` with a progress bar. Return its result and its last progress.

    `counting` is the name of the bar while the total isn't known.
    """
    last = Progress(0, 0, 0)
    with progress_bar(what, counting=counting) as bar:

        def tell(progress: Progress) -> None:
            nonlocal last
            last = progress
            bar(progress.groups, progress.total)

        return work(tell), last


def on_storage(
    url: str | URL, name: str, call: Callable[[SQLStorage], Awaitable[T]], codec: Codec | None = None, **settings: Any
) -> T:
    """Open a buffer of a database, return what `call(storage)` does, and close it. Imports all that writes."""
    import asyncio

    from replaybuf.storage.sql.backend import SQLStorage
    from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS

    async def run() -> T:
        text = url if isinstance(url, str) else url.render_as_string(hide_password=False)
        storage = SQLStorage(text, codec or AS_DICTS, name=name, **settings)
        try:
            return await call(storage)
        finally:
            await storage.close()

    return asyncio.run(run())


def whole_number(text: str, name: str) -> int:
    """Return a whole number that is an argument. Raises a usage error."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{redact(text)!r:.100} is not a whole number.", param_hint=name) from None


def status_of(text: str | None) -> Status | None:
    """Return the status of this name, or None for none. Raises InputError."""
    from replaybuf.rollouts.statuses import OUR_STATUSES, Status

    status = None if text is None else OUR_STATUSES.get(text)
    if text is not None and status is None:
        raise InputError(f"unknown status {redact(text)!r:.100}; there are {', '.join(Status)}")
    return status


def read_size(text: str, option: str) -> int:
    """Return the bytes that a size such as 500M means. Raises a usage error."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise typer.BadParameter(f"{text!r} is no size; write 500M or 1G.", param_hint=option)
    return max(1, int(float(found[1]) * _UNITS[found[2].lower()]))
