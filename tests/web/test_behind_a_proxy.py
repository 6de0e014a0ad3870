"""The pages behind a proxy, under a path of its own, and what an orchestrator asks."""

from __future__ import annotations

import html
import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urljoin

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.errors import ConfigError
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.web.app import create_app
from tests.cli.test_db import execute
from tests.web.conftest import Client, client_of
from tests.web.test_pages import PATHS

TOKEN = "a-token-that-is-long-enough"
PREFIX = "/runs/rl"


def stripping(app: Any, prefix: str) -> Callable[..., Awaitable[None]]:
    """A proxy that takes the prefix from what it asks for, and has nothing else."""

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"].startswith(f"{prefix}/"), scope["path"]
        path = scope["path"].removeprefix(prefix)
        await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    return proxy


@pytest.fixture(scope="session", params=["stripped", "kept"])
def behind(request: pytest.FixtureRequest, filled: str) -> Client:
    """The pages of the example under a prefix, which the proxy strips or keeps."""
    app = create_app(open_reader(filled), prefix=PREFIX)
    return Client(stripping(app, PREFIX) if request.param == "stripped" else app, filled)


def addresses(text: str) -> list[str]:
    """All that a page leads to, or loads: links, forms and files."""
    return re.findall(r'(?:href|src|action)="([^"]*)"', html.unescape(text))


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
def test_all_that_a_page_leads_to_is_below_the_prefix(behind: Client) -> None:
    for path in PATHS:
        answer = behind.get(PREFIX + path)
        assert answer.status_code == 200, answer.text
        there = [urljoin(PREFIX + path, one) for one in addresses(answer.text) if not one.startswith("#")]
        assert len(there) > 10
        assert [one for one in there if not one.startswith(f"{PREFIX}/")] == []


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
def test_what_pages_lead_to_is_there(behind: Client) -> None:
    """Each kind of page once, with its files."""
    seen: dict[str, str] = {}
    for path in ("/", "/groups", "/groups/1", "/steps", "/steps/401"):
        for one in addresses(behind.get(PREFIX + path).text):
            kind = re.sub(r"\d+", "N", one.partition("?")[0])
            if one.startswith(PREFIX) and kind not in seen:
                seen[kind] = one
    assert len(seen) > 10
    assert [one for one in seen.values() if behind.get(one).status_code != 200] == []


def test_a_token_is_kept_for_the_prefix_only(filled: str) -> None:
    client = client_of(filled, "rl.example", token=TOKEN, prefix=f"{PREFIX}/")
    answer = client.get(f"{PREFIX}/groups?token={TOKEN}")
    assert answer.headers["location"] == f"{PREFIX}/groups"
    assert f"path={PREFIX};" in answer.headers["set-cookie"].lower() + ";"
    assert client.get(f"{PREFIX}/groups").status_code == 200


@pytest.mark.parametrize("prefix", ["//evil.example", "rl", "/rl/../..", "/r l", '/"onload', "/rl?x"])
def test_no_other_text_is_a_prefix(filled: str, prefix: str) -> None:
    with pytest.raises(ConfigError, match="the prefix is a path such as /rl"):
        create_app(open_reader(filled), prefix=prefix)


def test_health_needs_no_token_and_says_nothing(filled: str) -> None:
    client = client_of(filled, host="10.0.0.7", token=TOKEN)
    for path in ("/healthz", "/readyz"):
        answer = client.get(path)
        assert (answer.status_code, answer.text) == (200, "ok\n")
        assert answer.headers["cache-control"] == "no-store"
        assert client.request("POST", path).status_code == 405


def test_it_is_not_ready_while_the_database_cant_be_read(url: str) -> None:
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        buffer.count("math", "completed")
    client = client_of(url)
    assert client.get("/readyz").status_code == 200
    execute(url, "ALTER TABLE rb_version RENAME TO rb_elsewhere")
    answer = client.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "the database can't be read\n")
    assert client.get("/healthz").status_code == 200
    execute(url, "ALTER TABLE rb_elsewhere RENAME TO rb_version")
    assert client.get("/readyz").status_code == 200
