"""`replaybuf watch`, `replaybuf serve`: a live view of a database, in the terminal and in the browser."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaybuf import units
from replaybuf.cli.app import Buffer, Url, option
from replaybuf.cli.frame import Panel, arrange, line, one_line, panels_of
from replaybuf.cli.output import console, write
from replaybuf.errors import MissingDriverError, ReplayBufError
from replaybuf.rules.transitions import RATE_SECONDS
from replaybuf.storage.sql.inspection.reader import Reader, open_reader

if TYPE_CHECKING:
    from rich.text import Text

    from replaybuf.storage.sql.inspection.waits import Dashboard, Reading


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Put the terminal into character mode in the block, and restore it. Without a terminal there are no keys.

    Yields a function that waits up to some seconds for a key and returns it: "" after a timeout, "q" at EOF.
    """

    def pressed(seconds: float) -> str:
        if not select.select([fd], [], [], seconds)[0]:
            return ""
        return os.read(fd, 1).decode("ascii", "replace") or "q"

    def never(seconds: float) -> str:
        time.sleep(seconds)
        return ""

    try:
        import termios
        import tty

        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (ImportError, OSError, ValueError, termios.error):
        yield never
        return
    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


#: The maximum fraction of the time spent reading: slow readings are made less often.
_SHARE = 0.1
_TICK = 0.1
_READ_TIMEOUT = 20.0
_ON_A_PIPE = 120
_ERROR_LINES = 3
_TERMINATED = 128 + 15
_HELP = [
    "q        quit (so does Ctrl-C)",
    "?        this help, and back",
    "r        read now",
    "",
    "in/min   groups put, and a ledger's prompts; out/min completed groups drawn: of the last minute",
    "SILENT   a worker that gave no sign of life for a minute, and didn't end",
    "staleness and reward are those of the completed groups that were put last",
]


def watch(
    url: Url,
    buffer: Buffer = None,
    interval: Annotated[
        float, option("--interval", "Read every so many seconds.", metavar="S", min=0.1, max=3600)
    ] = 2.0,
    once: Annotated[bool, option("--once", "Print one frame and end, as on a pipe.")] = False,
) -> None:
    """Watch a database, full screen: who waits and why, what goes in and out, staleness, rewards, workers, events.

    It only reads, by indexes and from small tables, so that a million groups cost as little as a few. Where reading
    takes long all the same, it is done less often than --interval says, and the screen says so. A database that is
    gone or locked is told, and tried again. The keys are q and ?; on a pipe one frame is printed.

    \b
    Examples:
      replaybuf watch run.db
      replaybuf watch postgresql://rl@db/run7 --interval 10
      replaybuf watch run.db --once | head -20
    """
    reader = open_reader(url)
    if once or not sys.stdout.isatty():
        found = _read(reader, buffer)
        state = Watched(reader.where, interval, found=found)
        out = console()
        width = _ON_A_PIPE if not out.is_terminal else out.width
        lines = arrange(state.head(width), panels_of(found), line(), width, None)
        _print(lines[:-1])  # without the line about keys
        return
    signal.signal(signal.SIGTERM, _terminate)
    _live(reader, buffer, interval)


def _print(lines: Sequence[Text]) -> None:
    out = console()
    if out.is_terminal:
        for one in lines:
            out.print(one, soft_wrap=True)
    else:
        write(f"{one.plain.rstrip()}\n" for one in lines)


def _read(reader: Reader, buffer: str | None) -> list[Dashboard]:
    from replaybuf.storage.sql.inspection.waits import read_dashboard

    return reader.read(lambda tx: read_dashboard(tx, buffer), timeout=_READ_TIMEOUT)


def _terminate(*_: Any) -> None:
    raise SystemExit(_TERMINATED)  # an exception, so that context managers restore the terminal


@dataclass(slots=True)
class Watched:
    """The state of the screen: the last reading, its error, and the history for rates."""

    where: str
    interval: float
    found: Sequence[Dashboard] = ()
    error: str = ""
    cost: float = 0.0
    read_at: float = 0.0
    helping: bool = False
    readings: dict[str, deque[Reading]] = field(default_factory=dict)

    @property
    def pause(self) -> float:
        """The seconds between two readings."""
        return max(self.interval, self.cost / _SHARE)

    def take(self, found: Sequence[Dashboard], error: str, cost: float) -> None:
        """Store a reading, or its error; `cost` is its duration in seconds."""
        self.error, self.cost = error, cost
        if not error:
            self.read_at = time.monotonic()
            self.found = [self._with_readings(one) for one in found]

    def _with_readings(self, one: Dashboard) -> Dashboard:
        """Return a read_dashboard whose rates are based on the readings made here, once these cover a minute."""
        kept = self.readings.setdefault(one.buffer, deque())
        kept.append(one.readings[-1])
        now = kept[-1][0]
        while len(kept) > 1 and (now - kept[1][0] >= RATE_SECONDS or kept[0][0] > now):
            kept.popleft()
        own = now - kept[0][0] >= RATE_SECONDS or (len(one.readings) == 1 and len(kept) > 1)
        return replace(one, readings=[*kept]) if own else one

    def head(self, width: int) -> list[Text]:
        """Return the first lines: time, interval, database, and the last reading's error."""
        at = f"{units.clock(self.found[0].about.now)} UTC" if self.found else "reading ..."
        why = f": reading takes {self.cost:.2g} s" if self.pause > self.interval else ""
        lines = [line((at, "bold"), f"  every {self.pause:.2g} s{why}  {self.where}")]
        if self.error:
            old = f" (the figures are {units.age(time.monotonic() - self.read_at)} old)" if self.found else ""
            wrong = one_line(f"trying again{old}: {self.error}")
            starts = range(0, min(len(wrong), _ERROR_LINES * width), width)
            lines += [line((wrong[start : start + width], "bold red")) for start in starts]
        return lines

    def lines(self, width: int, height: int) -> list[Text]:
        """Return the lines of the screen."""
        panels = [Panel("help", [line(text) for text in _HELP], least=20)] if self.helping else panels_of(self.found)
        return arrange(self.head(width), panels, line(("q quit  ? help", "dim")), width, height)


#: A reading, its error ("" for none), and its duration in seconds.
_News = tuple[Sequence["Dashboard"], str, float]


def _begin_reading(reader: Reader, buffer: str | None, news: queue.SimpleQueue[_News]) -> None:
    """Read in a thread, so that keys work while the database doesn't answer."""

    def read() -> None:
        import replaybuf.storage.sql.inspection.waits  # noqa: F401  # its import isn't what a reading costs

        started = time.monotonic()
        try:
            news.put((_read(reader, buffer), "", time.monotonic() - started))
        except Exception as wrong:  # of any kind: the next reading may succeed
            kind = "" if isinstance(wrong, ReplayBufError) else f"{type(wrong).__name__}: "
            news.put(((), f"{kind}{wrong}", 0.0))

    threading.Thread(target=read, daemon=True).start()


def _live(reader: Reader, buffer: str | None, interval: float) -> None:
    from rich.console import ConsoleDimensions
    from rich.live import Live
    from rich.text import Text

    state = Watched(reader.where, interval)
    news: queue.SimpleQueue[_News] = queue.SimpleQueue()
    out = console()
    shown, asked_at, waiting = None, float("-inf"), False
    with keys() as pressed, Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            now = time.monotonic()
            if not waiting and now - asked_at >= state.pause:
                asked_at, waiting = now, True
                _begin_reading(reader, buffer, news)
            while not news.empty():
                waiting = False
                state.take(*news.get())
            out.size = ConsoleDimensions(*os.get_terminal_size(sys.stdout.fileno()))  # COLUMNS isn't updated
            lines = state.lines(*out.size)
            if (out.size, lines) != shown:
                shown = (out.size, lines)
                live.update(Text("\n", no_wrap=True).join(lines), refresh=True)
            match pressed(_TICK):
                case "q" | "Q":
                    return
                case "?":
                    state.helping = not state.helping
                case "r" | "R":
                    asked_at = float("-inf")


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
            variable="REPLAYBUF_TOKEN",
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
    that is printed. Ctrl-C ends it. It needs pip install starlette uvicorn jinja2.

    \b
    Examples:
      replaybuf serve run.db
      replaybuf serve run.db --port 8080
      replaybuf serve postgresql://reader@db.cluster/rl --buffer train
      replaybuf serve run.db --host 0.0.0.0
      replaybuf serve run.db --host 0.0.0.0 --prefix /rl
    """
    try:
        from replaybuf.web import server
        from replaybuf.web.app import create_app
    except ModuleNotFoundError as error:
        packages = "starlette uvicorn jinja2"
        raise MissingDriverError(f"the page needs the package {error.name}: pip install {packages}") from error
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
    server.serve(app, listening, lambda: typer.echo(f"{reader.where} is at {address}  (Ctrl-C ends it)"))
