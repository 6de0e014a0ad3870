"""`replaybuf watch`, `replaybuf serve`: a live view of a database, in the terminal and in the browser."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaybuf.cli import stats, why
from replaybuf.cli.commands import Buffer, Url, option
from replaybuf.cli.output import console, write
from replaybuf.common import units
from replaybuf.common.redact import escape_line
from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.inspection.reader import Reader, Transaction, open_reader
from replaybuf.view.wait_reasons import Waits, read_waits

if TYPE_CHECKING:
    from rich.text import Text

#: The maximum fraction of the time spent reading: slow readings are made less often.
_SHARE = 0.1
_READ_TIMEOUT = 20.0
_TERMINATED = 128 + 15


def watch(
    url: Url,
    buffer: Buffer = None,
    interval: Annotated[
        float, option("--interval", "Read every so many seconds.", metavar="S", min=0.1, max=3600)
    ] = 2.0,
    once: Annotated[bool, option("--once", "Print the view once and end, as on a pipe.")] = False,
) -> None:
    """Watch a database, full screen: who waits and why, then who is there and what "stats" prints, every two seconds.

    The processes that wait come first, of every buffer, with the cause to remove; then leases and workers, the groups
    with their rewards and staleness, the totals. What the terminal has no lines for is left out at the end.

    It only reads. Where that takes long, it is done less often than --interval says. The error of a database that is
    gone or locked is shown, and the read is tried again. Ctrl-C ends it; on a pipe the view is printed once.

    \b
    Examples:
      replaybuf watch run.db
      replaybuf watch postgresql://rl@db/run7 --interval 10
      replaybuf watch run.db --once | head -20
    """
    reader = open_reader(url)
    if once or not sys.stdout.isatty():
        _print(_read(reader, buffer))
        return
    signal.signal(signal.SIGTERM, _terminate)
    _live(reader, buffer, interval)


def _terminate(*_: Any) -> None:
    raise SystemExit(_TERMINATED)  # an exception, so that context managers restore the terminal


#: The waits of each buffer, buffers in which somebody waits first, the figures of `stats`, and the time.
_View = tuple[list[Waits], dict[str, Any], datetime]


def _read(reader: Reader, buffer: str | None) -> _View:
    def read(tx: Transaction) -> _View:
        waits = sorted(read_waits(tx, buffer), key=lambda one: not one.somebody_waits)
        return waits, stats.read(tx, buffer), tx.now()

    return reader.read(read, timeout=_READ_TIMEOUT)


def _print(view: _View) -> None:
    waits, figures, now = view
    several = len(waits) > 1
    for one in waits:
        real = one if one.somebody_waits else replace(one, waits=[])  # without answers to questions that nobody asked
        if not why.print_waits(real, several=several):
            write([f"Nobody waits{f' in {escape_line(one.buffer)}' if several else ''}\n"])
    for one in waits:
        why.print_processes(one, several=several)
    write(["\n"])
    stats.print_stats(figures, now)


def _live(reader: Reader, buffer: str | None, interval: float) -> None:
    from rich.console import ConsoleDimensions, Group
    from rich.live import Live
    from rich.text import Text

    head, body = Text(f"reading {reader.where} ..."), Text()
    out = console()
    with Live(head, console=out, screen=True, auto_refresh=False) as live:
        live.refresh()
        while True:
            started, wrong = time.monotonic(), Text()
            try:
                view = _read(reader, buffer)
                head = Text(f"{units.moment(view[2])[11:]} UTC  {reader.where}", style="bold")
                body = _as_text(view)
            except Exception as error:  # of any kind: the next reading may succeed
                kind = "" if isinstance(error, ReplayBufError) else f"{type(error).__name__}: "
                wrong = Text(escape_line(f"trying again: {kind}{error}"), style="bold red")
            pause = max(interval, (time.monotonic() - started) / _SHARE if not wrong else 0)
            out.size = ConsoleDimensions(*os.get_terminal_size(sys.stdout.fileno()))  # COLUMNS isn't updated
            live.update(Group(head, *([wrong] if wrong else []), body), refresh=True)
            time.sleep(pause)


class _Captured(io.StringIO):
    """Takes what is printed for a terminal."""

    def isatty(self) -> bool:
        return True


def _as_text(view: _View) -> Text:
    from rich.text import Text

    printed = _Captured()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        _print(view)
    return Text.from_ansi(printed.getvalue())


# In the browser

PORT = 8321
_LOCALHOST = "127.0.0.1"


def serve(
    url: Url,
    port: Annotated[int, option("--port", "The port; 0 for one that is free.", min=0, max=65535)] = PORT,
    host: Annotated[
        str, option("--host", "Where to listen; all but 127.0.0.1 and ::1 need a token.", metavar="ADDRESS")
    ] = _LOCALHOST,
    token: Annotated[
        str | None,
        option(
            "--token",
            "Ask for this token; without it one is made, where one is needed. Rather set REPLAYBUF_TOKEN: what is "
            "typed here other users of the machine can see.",
            envvar="REPLAYBUF_TOKEN",
            metavar="TEXT",
        ),
    ] = None,
    buffer: Buffer = None,
    prefix: Annotated[
        str, option("--prefix", "The path under which a proxy has the page, such as /rl.", metavar="PATH")
    ] = "",
) -> None:
    """Show a database in the browser, on a page of this machine.

    The page only reads, and the run doesn't notice. It is at http://127.0.0.1:8321/ and for this machine only; on a
    server, forward the port: ssh -L 8321:localhost:8321 HOST. With --host 0.0.0.0 others reach it, too, with the token
    that is printed. Ctrl-C ends it. It needs the extra web: pip install starlette uvicorn jinja2.

    \b
    Examples:
      replaybuf serve run.db
      replaybuf serve run.db --port 8080
      replaybuf serve postgresql://reader@db.cluster/rl --buffer train
      replaybuf serve run.db --host 0.0.0.0
      replaybuf serve run.db --host 0.0.0.0 --prefix /rl
    """
    from replaybuf.web import server
    from replaybuf.web.app import create_app

    reader = open_reader(url)
    reader.read(lambda tx: None)
    if token is not None:
        server.check_token(token)
    elif not server.is_loopback(host):
        token = server.new_token()
    app = create_app(reader, buffer=buffer, token=token, prefix=prefix)
    listening = server.bind(host, port)
    address = server.address_of(listening, host) + server.check_prefix(prefix).lstrip("/")
    if token is not None:
        address += f"?token={token}"
    typer.echo(f"{reader.where} is at {address}  (Ctrl-C ends it)")
    server.serve(app, listening)
