"""The pages as an ASGI application."""

from __future__ import annotations

import hashlib
import json
import mimetypes
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from replaybuf import __version__, units
from replaybuf.errors import InputError, QueryError, ReplayBufError, StorageError
from replaybuf.observe import CONTENT_TYPE, prometheus, read_figures
from replaybuf.redact import escape, redact_words
from replaybuf.rules.circumstances import LIVE_SECONDS
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction
from replaybuf.storage.sql.inspection.run_records import last_sign_of
from replaybuf.web.ask import LARGEST, PARAMETERS, Ask, NotThereError, OtherRun, other_runs
from replaybuf.web.pages import PAGES, Data, Page
from replaybuf.web.pages.sql import CSV_ROWS, ROWS
from replaybuf.web.server import READ_SECONDS, STATEMENTS_AT_ONCE, Guard, Readings, check_prefix, health_of, path_of

_HERE = Path(__file__).parent
_STATIC = ("page.css", "page.js", "plots.js", "complete.js", "icon.svg")
_REASONS = {401: "This page needs a token", 404: "Not found", 405: "Not allowed", 421: "Another name"}

Answer = Callable[[Request], Awaitable[Response]]
#: Makes a response from a page's data and the sentence about the last heartbeat (`_idle`).
Respond = Callable[[Request, Page, Ask, Data, str], Response]


def create_app(
    reader: Reader,
    *,
    buffer: str | None = None,
    token: str | None = None,
    seconds: float = READ_SECONDS,
    beside: Sequence[str] = (),
    prefix: str = "",
) -> ASGIApp:
    """Return the pages of a database, or of one buffer in it.

    With a token, requests must carry it; without, only requests for names of this machine (`localhost`) are answered.
    A page whose read takes longer than `seconds` shows an error instead. The train steps of other databases and of
    exports `beside` can be plotted over those of this one. `prefix` ("/rl") is the path of the pages on a proxy, which
    may strip it or not; raises ConfigError for an invalid prefix.
    """
    prefix = check_prefix(prefix)
    site = _Site(reader, seconds, buffer, other_runs(beside), prefix)
    pages = Starlette(
        routes=[*site.routes(), *health_of(reader)],
        exception_handlers={HTTPException: site.http_error, ReplayBufError: site.error, Exception: site.defect},
    )
    return Guard(pages, token, site.refusal, prefix)


class _Site:
    """Renders pages and errors."""

    def __init__(
        self, reader: Reader, seconds: float, buffer: str | None, others: Mapping[str, OtherRun], prefix: str
    ) -> None:
        self._readings = Readings(reader, seconds=seconds)
        self._prefix = prefix
        self._others = others
        self._statements = Readings(reader, seconds=seconds, at_once=STATEMENTS_AT_ONCE)
        self._buffer = buffer
        self._files = {name: (_HERE / "static" / name).read_bytes() for name in _STATIC}
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            finalize=_shown,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals |= {
            "prefix": prefix,
            "database": reader.where,
            "version": __version__,
            "files": {
                name: f"{prefix}/static/{name}?v={hashlib.sha256(content).hexdigest()[:12]}"
                for name, content in self._files.items()
            },
            **{name: getattr(units, name) for name in ("figure", "short", "size", "ago", "moment", "cell")},
        }

    async def _static(self, request: Request) -> Response:
        if (content := self._files.get(name := request.path_params["name"])) is None:
            raise HTTPException(404)
        headers = {"Cache-Control": "private, max-age=31536000, immutable"}  # its URL has its digest
        return Response(content, media_type=mimetypes.guess_type(name)[0], headers=headers)

    def routes(self) -> list[Route]:
        found = []
        for name, page in PAGES.items():
            path = f"/{name}" if page.path == "/" else page.path
            found.append(Route(page.path, self._page(page, partial(self._html, name)), name=name))
            found.append(Route(f"/api{path}.json", self._page(page, self._json), name=f"{name}.json"))
            if page.rows is not None:
                found.append(Route(f"/csv{path}.csv", self._page(page, self._csv, CSV_ROWS), name=f"{name}.csv"))
        return [*found, Route("/metrics", self._metrics, name="metrics"), Route("/static/{name}", self._static)]

    async def _metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus's text format."""
        figures = await self._readings.run(
            lambda reader, seconds: read_figures(reader, buffer=self._buffer, timeout=seconds)
        )
        return Response(prometheus(figures), headers={"Content-Type": CONTENT_TYPE})

    def _page(self, page: Page, respond: Respond, rows: int = ROWS) -> Answer:
        """Return a page's request handler; it responds inside the read transaction, if the page has one.

        `rows` limits the result of a statement.
        """

        async def answer(request: Request) -> Response:
            ask = self._ask(request)

            def work(reader: Reader, seconds: float) -> Response:
                if page.read is not None:
                    read, asked = page.read, self._compared(ask, seconds) if page.compares else ask

                    def shown(tx: ReadTransaction) -> Response:
                        return respond(request, page, asked, {"now": tx.now(), **read(tx, asked)}, _idle(tx, asked))

                    return reader.read(shown, timeout=seconds)
                assert page.run is not None
                if self._buffer is not None:
                    raise NotThereError(f"this page is of the buffer {self._buffer!r:.100} only, and SQL reads all")
                return respond(request, page, ask, page.run(reader, ask, seconds, rows), "")

            return await (self._readings if page.read else self._statements).run(work)

        return answer

    def _html(self, name: str, request: Request, page: Page, ask: Ask, data: Data, idle: str) -> Response:
        where = "/overview" if request.url.path == "/" else request.url.path
        csv = ask.same(f"/csv{where}.csv") if page.rows else None
        values = {**data, **page.draw(data, ask), "as_file": {"json": ask.same(f"/api{where}.json"), "csv": csv}}
        text = self._render(f"{name}.html", ask, name=name, title=page.title, idle=idle, **values)
        return HTMLResponse(text, _status(data))

    def _json(self, request: Request, page: Page, ask: Ask, data: Data, idle: str) -> Response:
        return Response(_as_json(data), _status(data), media_type="application/json")

    def _csv(self, request: Request, page: Page, ask: Ask, data: Data, idle: str) -> Response:
        """Return the table of a page as CSV."""
        assert page.rows is not None
        found = [units.plain(row, datetime.isoformat) for row in page.rows(data)]
        name = request.url.path.rsplit("/", 1)[1]
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        lines = units.csv_lines(found, for_spreadsheets=True)
        return Response("".join(lines).encode(errors="replace"), headers=headers, media_type="text/csv")

    def _compared(self, ask: Ask, seconds: float) -> Ask:
        """Return the request, with the train steps of another run if one is to be plotted beside."""
        steps_of = self._others.get(ask.text("beside") or "")
        elsewhere = None if steps_of is None else steps_of(ask.number("before", least=-LARGEST), seconds)
        return replace(ask, others=[*self._others], elsewhere=elsewhere)

    def _ask(self, request: Request) -> Ask:
        parameters = {name: one for name, one in request.query_params.items() if name in PARAMETERS}
        if self._buffer is not None:
            parameters["buffer"] = self._buffer
        path = {name: str(value) for name, value in request.path_params.items()}
        return Ask(parameters, path, prefix=self._prefix)

    def _render(self, template: str, ask: Ask, *, idle: str = "", **values: Any) -> str:
        buffer = ask.text("buffer")
        menu = [
            (name, page.title, Ask({}, prefix=self._prefix).link(page.path, buffer=buffer))
            for name, page in PAGES.items()
            if page.in_menu and (page.read is not None or self._buffer is None)
        ]
        return self._templates.get_template(template).render(ask=ask, buffer=buffer, menu=menu, idle=idle, **values)

    # Errors

    def refusal(self, request: Request, status: int, reason: str) -> Response:
        """Return the error page with the reason of a refusal."""
        title = _REASONS.get(status, "That didn't work")
        if path_of(request).startswith("/api/"):
            return Response(_as_json({"error": reason}), status, media_type="application/json")
        text = self._render(
            "error.html",
            Ask({}, prefix=self._prefix),
            name="",
            title=title,
            reason=reason,
            status=status,
            path=path_of(request),
        )
        return HTMLResponse(text, status)

    async def http_error(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return self.refusal(request, status, "There is no such page." if status == 404 else str(error))

    async def error(self, request: Request, error: Exception) -> Response:
        if isinstance(error, NotThereError):
            status = 404
        elif isinstance(error, InputError | QueryError):
            status = 400
        else:
            status = 503 if isinstance(error, StorageError) else 500
        return self.refusal(request, status, redact_words(str(error)))

    async def defect(self, request: Request, error: Exception) -> Response:
        """Respond to an unexpected exception; its traceback, which may quote rollouts, goes to stderr only."""
        print(escape("".join(traceback.format_exception(error)), keep="\n"), file=sys.stderr)
        return self.refusal(request, 500, f"An unexpected {type(error).__name__}; the server's terminal shows where.")


def _shown(value: Any) -> Any:
    """Return a value for a template: "" for None, and texts without control characters."""
    if value is None:
        return ""
    if hasattr(value, "__html__") or not isinstance(value, str):
        return value
    return escape(value, keep="\n\t")


def _as_json(value: Any) -> bytes:
    """Return JSON for programs: times as ISO 8601, numbers that JSON lacks as null, all in ASCII."""
    return json.dumps(units.plain(value, datetime.isoformat), allow_nan=False).encode()


def _idle(tx: Any, ask: Ask) -> str:
    """Return the age of the last heartbeat as a sentence; "" while it is recent.

    Idle processes send a heartbeat only every 30 seconds, so the sentence says how old it is, not that they are gone.
    """
    now = tx.now()
    last = last_sign_of(tx, ask.text("buffer"), now, LIVE_SECONDS)
    if last is None:
        return ""
    ago = units.ago(last.time, now)
    return f"run ended {ago}" if last.ended else f"last sign of life {ago}"


def _status(data: Mapping[str, Any]) -> int:
    """Return the HTTP status of a page: 400 if it reports an invalid query."""
    return 400 if data.get("error") else 200
