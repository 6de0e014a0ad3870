"""Databases to look into."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import httpx
import pytest
from sqlalchemy import make_url

from replaybuf.common import units
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.web.app import create_app
from replaybuf.web.pages import PAGES
from replaybuf.web.tables import Ask
from tests.postgres import execute, new_url
from tests.web.example import fill


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the example, which tests only read."""
    for url in new_url(request.param, request, tmp_path_factory.mktemp("web")):
        asyncio.run(fill(url))
        yield url


@pytest.fixture
def url(shared_url: str) -> str:
    """The URL of a new database."""
    return shared_url


@pytest.fixture(scope="session")
def reader(filled: str) -> Iterator[str]:
    """The URL of the example for somebody who only reads."""
    if filled.startswith("sqlite"):
        yield filled
        return
    execute(filled, "CREATE ROLE viewer LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO viewer")
    yield make_url(filled).set(username="viewer").render_as_string(hide_password=False)
    execute(filled, "DROP OWNED BY viewer; DROP ROLE viewer")


@pytest.fixture(scope="session")
def pages(filled: str) -> Any:
    """The pages of the example, whose templates are compiled once."""
    return create_app(open_reader(filled))


@pytest.fixture
def page(pages: Any, filled: str) -> Client:
    return Client(pages, filled)


class Client:
    """Asks the pages as a browser does, without a server."""

    def __init__(self, app: Any, url: str, host: str = "localhost") -> None:
        self._url = url
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._base_url = f"http://{host}:8321"
        self._cookies = httpx.Cookies()

    def get(self, path: str, **settings: Any) -> httpx.Response:
        return self.request("GET", path, **settings)

    def data(self, name: str, parameters: Mapping[str, object] | None = None, **path: object) -> dict[str, Any]:
        """Return what a page reads, as plain values; `path` has the numbers in the page's path."""
        ask = Ask({key: str(value) for key, value in (parameters or {}).items()}, {k: str(v) for k, v in path.items()})
        found = open_reader(self._url).read(lambda tx: PAGES[name].show(tx, ask))
        plain: dict[str, Any] = units.plain(found, datetime.isoformat)
        return plain

    def request(self, method: str, path: str, **settings: Any) -> httpx.Response:
        return asyncio.run(self._request(method, path, settings))

    async def _request(self, method: str, path: str, settings: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=self._transport, base_url=self._base_url, cookies=self._cookies
        ) as client:
            answer = await client.request(method, path, **settings)
            self._cookies = client.cookies
            return answer


def client_of(url: str, host: str = "localhost", **settings: Any) -> Client:
    """Return a client of the pages of a database."""
    return Client(create_app(open_reader(url), **settings), url, host)
