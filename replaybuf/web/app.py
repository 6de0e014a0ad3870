"""The pages, by the names of their templates, as an ASGI application; their HTTP statuses and refusals."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from replaybuf import __version__
from replaybuf.common import units
from replaybuf.common.redact import escape, redact_words
from replaybuf.errors import InputError, QueryError, ReplayBufError, StorageError
from replaybuf.storage.sql.inspection.reader import Reader, Transaction
from replaybuf.storage.sql.inspection.run_records import STEPS_BEFORE
from replaybuf.storage.sql.inspection.wait_facts import last_worker
from replaybuf.view.metrics import CONTENT_TYPE, prometheus, read_figures
from replaybuf.web.group_pages import show_group, show_groups
from replaybuf.web.page_tables import PARAMETERS, Ask, NotThereError
from replaybuf.web.run_pages import show_overview, show_step, show_steps, show_workers
from replaybuf.web.server import READ_SECONDS, READY_SECONDS, Guard, Readings, check_prefix, health_of

_FOLDER = Path(__file__).parent
_TITLES = {401: "This page needs a token", 404: "Not found", 405: "Not allowed", 421: "Another name"}

Answer = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class _Page:
    """A page: its path and title, and a function for the values of its template, which reads in one transaction."""

    path: str
    title: str
    show: Callable[[Transaction, Ask], dict[str, Any]]
    in_menu: bool = True


PAGES = {
    "overview": _Page("/", "Overview", show_overview),
    "groups": _Page("/groups", "Groups", show_groups),
    "group": _Page("/groups/{uid}", "Group", show_group, in_menu=False),
    "steps": _Page("/steps", "Steps", show_steps),
    "step": _Page("/steps/{step}", "Step", show_step, in_menu=False),
    "workers": _Page("/workers", "Workers", show_workers),
}


def create_app(
    reader: Reader,
    *,
    buffer: str | None = None,
    token: str | None = None,
    seconds: float = READ_SECONDS,
    prefix: str = "",
) -> ASGIApp:
    """Return the pages of a database, or of one buffer in it.

    With a token, requests must carry it; without, only requests for names of this machine (`localhost`) are answered.
    A page whose read takes longer than `seconds` shows an error instead. `prefix` ("/rl") is the path of the pages on a
    proxy, which may strip it or not; raises ConfigError for an invalid prefix.
    """
    prefix = check_prefix(prefix)
    readings = Readings(reader, seconds=seconds)
    site = _Site(readings, buffer, prefix)
    pages = Starlette(
        routes=[*site.routes(), *health_of(Readings(reader, seconds=READY_SECONDS))],
        exception_handlers={HTTPException: site.http_error, ReplayBufError: site.error, Exception: site.defect},
    )
    return Guard(pages, token, site.refusal, prefix)


class _Site:
    """Renders pages and errors."""

    def __init__(self, readings: Readings, buffer: str | None, prefix: str) -> None:
        self._readings = readings
        self._prefix = prefix
        self._buffer = buffer
        self._templates = Environment(
            loader=FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            finalize=_template_value,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals |= {
            "prefix": prefix,
            "database": readings.reader.where,
            "version": __version__,
            **{name: getattr(units, name) for name in ("figure", "short", "size", "ago", "moment")},
            "steps_before": STEPS_BEFORE,
        }

    def routes(self) -> list[BaseRoute]:
        pages = [Route(page.path, self._page(name, page), name=name) for name, page in PAGES.items()]
        static = Mount("/static", StaticFiles(directory=_FOLDER / "static"))
        return [*pages, Route("/metrics", self._metrics, name="metrics"), static]

    async def _metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus's text format."""
        figures = await self._readings.run(
            lambda reader, seconds: read_figures(reader, buffer=self._buffer, timeout=seconds)
        )
        return Response(prometheus(figures), headers={"Content-Type": CONTENT_TYPE})

    def _page(self, name: str, page: _Page) -> Answer:
        """Return a page's request handler; it renders inside the read transaction."""

        async def answer(request: Request) -> Response:
            ask = self._ask(request)

            def respond(tx: Transaction) -> Response:
                values = page.show(tx, ask)
                context: dict[str, Any] = {"name": name, "title": page.title, "idle": _idle(tx, ask), "now": tx.now()}
                text = self._render(f"{name}.html", ask, **context, **values)
                return HTMLResponse(text, 400 if values.get("error") else 200)  # an invalid query

            return await self._readings.run(lambda reader, seconds: reader.read(respond, timeout=seconds))

        return answer

    def _ask(self, request: Request) -> Ask:
        parameters = {name: value for name, value in request.query_params.items() if name in PARAMETERS}
        if self._buffer is not None:
            parameters["buffer"] = self._buffer
        path = {name: str(value) for name, value in request.path_params.items()}
        return Ask(parameters, path, prefix=self._prefix)

    def _render(self, template: str, ask: Ask, *, idle: str = "", **values: Any) -> str:
        buffer = ask.text("buffer")
        menu = [
            (name, page.title, Ask({}, prefix=self._prefix).link(page.path, buffer=buffer))
            for name, page in PAGES.items()
            if page.in_menu
        ]
        return self._templates.get_template(template).render(ask=ask, buffer=buffer, menu=menu, idle=idle, **values)

    # Errors

    def refusal(self, request: Request, status: int, reason: str) -> Response:
        """Return the error page with the reason of a refusal."""
        title = _TITLES.get(status, "That didn't work")
        text = self._render(
            "error.html",
            Ask({}, prefix=self._prefix),
            name="",
            title=title,
            reason=reason,
            status=status,
        )
        return HTMLResponse(text, status)

    async def http_error(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        pages = f"There is no such page; there are {', '.join(page.path for page in PAGES.values())}."
        return self.refusal(request, status, pages if status == 404 else str(error))

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


def _template_value(value: Any) -> Any:
    """Return a value for a template: "" for None, and texts without control characters."""
    if value is None:
        return ""
    if hasattr(value, "__html__") or not isinstance(value, str):
        return value
    return escape(value, keep="\n\t")


def _idle(tx: Any, ask: Ask) -> str:
    """Return the age of the last heartbeat as a sentence; "" while some process is alive."""
    if (worker := last_worker(tx, ask.text("buffer"))) is None:
        return ""
    age = units.ago(units.time_of(worker.left_at), tx.now())
    return f"last sign of life {age}" if worker.ended_at is None else f"run ended {age}"
