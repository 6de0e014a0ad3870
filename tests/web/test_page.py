"""The page as a program: its start, tables, safety and proxies."""

from __future__ import annotations

import html
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.errors import ConfigError, InputError
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.view.columns import columns
from replaybuf.web import page_tables as tables
from replaybuf.web.app import PAGES, create_app
from replaybuf.web.page_tables import Ask, Table, table_of
from replaybuf.web.server import MIN_TOKEN, READ_SECONDS, check_token
from tests.pages import Page
from tests.postgres import execute
from tests.web.conftest import Client, client_of
from tests.web.test_pages import PATHS

PAGE = Page("looking.md", "### For programs")


def test_every_page_is_named() -> None:
    for page in PAGES.values():
        assert not page.in_menu or page.title in PAGE.text


def test_every_figure_is_that_of_the_code() -> None:
    words = " ".join(PAGE.text.split())
    assert f"{MIN_TOKEN} characters or more" in words
    assert f"more than {READ_SECONDS:g} s is stopped" in words


def test_the_application_is_made_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ReplayBufferConfig(url="sqlite:///run.db").build_sync():
        pass
    names: dict[str, Any] = {}
    exec(PAGE.sections.split("```python\n", 1)[1].split("```", 1)[0], names)
    assert names["app"] is not None


@dataclass
class Row:
    name: str
    value: float | None


def listed(rows: list[Any], ask: Ask, names: tuple[str, ...]) -> Table:
    return table_of("any", rows, columns(*names), ask, datetime.now(UTC))


ROWS = [Row("a", 2.0), Row("b", None), Row("c", 1.0)]


@pytest.mark.parametrize(
    ("order", "expected"), [(None, "abc"), ("value", "cab"), ("-value", "acb"), ("-name", "cba"), ("name", "abc")]
)
def test_rows_without_a_value_come_last_in_both_directions(order: str | None, expected: str) -> None:
    ask = Ask({} if order is None else {"order": order})
    assert "".join(row.name for row in listed(ROWS, ask, ("name", "value")).rows) == expected


def test_every_row_is_on_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SIZE", 3)
    rows, listed_rows, after = [{"n": n} for n in range(10)], [], 0
    while True:
        page = listed(rows, Ask({"after": str(after)}), ("n",))
        listed_rows += page.rows
        assert page.first == after
        if page.next is None:
            break
        after = page.next
    assert listed_rows == rows


@pytest.mark.parametrize("order", ["nope", "-", "--name", "name; DROP TABLE groups"])
def test_an_unknown_column_is_an_error_that_names_the_columns(order: str) -> None:
    with pytest.raises(InputError, match="order must be one of name, value"):
        listed(ROWS, Ask({"order": order}), ("name", "value"))


def test_rows_may_be_ordered_by_a_column_of_usual_values_only() -> None:
    """It isn't shown, but was, when its heading was followed."""
    rows = [{"uid": 1, "leased": 0}, {"uid": 2, "leased": 0}]
    table = listed(rows, Ask({"order": "-leased"}), ("uid", "leased"))
    assert ([column.name for column in table.columns], len(table.rows)) == (["uid"], 2)


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
@pytest.mark.parametrize("path", ["/", "/steps", "/workers", "/steps/413", "/groups"])
def test_every_heading_that_sorts_does(page: Client, path: str) -> None:
    links = re.findall(r'<th scope="col"[^>]*><a href="([^"]*)"', page.get(path).text)
    assert links
    for link in (links[0], links[-1]):
        answer = page.get(path + html.unescape(link))
        assert answer.status_code == 200, link
        assert "aria-sort=" in answer.text
    leads = {
        other.split("?")[0].rsplit("/", 1)[0]: other for other in sorted(re.findall(r'href="(/[^"]*)"', answer.text))
    }
    for other in leads.values() if path in ("/", "/groups") else ():
        assert page.get(html.unescape(other)).status_code == 200, other


TOKEN = "a-token-that-is-long-enough"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('security')}/run.db"
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        buffer.count("math", "completed")
    return url


@pytest.mark.parametrize("path", ["/", "/nix", "/static/page.js", "/groups/abc"])
def test_every_answer_forbids_what_the_page_doesnt_need(secured: str, path: str) -> None:
    for client in (client_of(secured), client_of(secured, token=TOKEN), client_of(secured, host="evil.example")):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert "server" not in headers


def test_only_reading_is_answered(secured: str) -> None:
    client = client_of(secured)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert [client.request(method, path).status_code for path in ("/", "/nix")] == [405, 404]
    assert client.request("HEAD", "/").status_code == 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.0.1", "[::1]", "run.localhost"])
def test_names_of_this_machine_are_answered(secured: str, host: str) -> None:
    assert client_of(secured, host=host).get("/").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evillocalhost", "10.0.0.7", "localhost.evil.example", "127.0.0.1.nip.io", "[::2]"]
)
def test_other_names_are_refused_without_a_token(secured: str, host: str) -> None:
    answer = client_of(secured, host=host).get("/")
    assert answer.status_code == 421
    assert "run.db" not in answer.text.partition("<main")[2]


def test_a_token_is_asked_for(secured: str) -> None:
    client = client_of(secured, host="10.0.0.7", token=TOKEN)
    for path in ("/", "/groups", "/?token=wrong", "/?token="):
        assert client.get(path).status_code == 401
    assert client.get("/", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize("host", ["a/static/", "localhost/static/", "a?", "a@b", "a b", "[::1]/static/"])
@pytest.mark.parametrize("token", [None, TOKEN])
def test_no_host_header_opens_the_pages(secured: str, host: str, token: str | None) -> None:
    answer = client_of(secured, token=token).get("/groups", headers={"Host": host})
    assert answer.status_code == 400
    assert 'action="/groups"' not in answer.text


def test_a_token_is_kept_in_a_cookie_and_leaves_the_address(secured: str) -> None:
    client = client_of(secured, host="10.0.0.7", token=TOKEN)
    answer = client.get(f"/groups?order=uid&token={TOKEN}&size=3")
    assert (answer.status_code, answer.headers["location"]) == (303, "/groups?order=uid&size=3")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/groups").status_code == 200


def test_a_token_never_leads_to_another_host(secured: str) -> None:
    client = client_of(secured, token=TOKEN)
    for path in ("//evil.example/", "/\\evil.example/", "///evil.example"):
        location = client.get(f"http://localhost{path}?token={TOKEN}").headers["location"]
        assert location.startswith("/")
        assert not location.startswith(("//", "/\\"))


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 15, "with a space in the middle", "ünïcödé-ünïcödé-ünïcödé", "a;b" * 9]
)
def test_a_token_that_can_be_guessed_or_isnt_one_is_refused(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_token(token)
    assert not token or token not in str(caught.value)


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
def test_all_that_a_page_leads_to_is_below_the_prefix_and_there(behind: Client) -> None:
    """Each kind of page once, with its files."""
    paths: dict[str, str] = {}
    for path in PATHS:
        answer = behind.get(PREFIX + path)
        assert answer.status_code == 200, answer.text
        linked = [urljoin(PREFIX + path, link) for link in addresses(answer.text) if not link.startswith("#")]
        assert len(linked) > 10
        assert [link for link in linked if not link.startswith(f"{PREFIX}/")] == []
        paths |= {re.sub(r"\d+", "N", link.partition("?")[0]): link for link in linked if link not in paths.values()}
    assert len(paths) >= 10
    assert [link for link in paths.values() if behind.get(link).status_code != 200] == []


def test_a_token_is_asked_for_below_the_prefix_and_the_database_is_not_named(filled: str) -> None:
    """The form leads to the address that it is at, and the browser knows more of that than the server."""
    text = client_of(filled, "rl.example", token=TOKEN, prefix=PREFIX).get(f"{PREFIX}/groups").text
    assert "<form" in text
    assert "action=" not in text
    assert open_reader(filled).where not in text


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
