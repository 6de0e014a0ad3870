"""Who may read the pages, and what browsers may do with them."""

from __future__ import annotations

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.errors import ConfigError
from replaybuf.web.server import check_token, is_loopback
from tests.web.conftest import client_of

TOKEN = "a-token-that-is-long-enough"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('security')}/run.db"
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        buffer.count("math", "completed")
    return url


@pytest.mark.parametrize("path", ["/", "/nix", "/static/page.js", "/groups/abc"])
def test_every_answer_forbids_what_the_page_doesnt_need(url: str, path: str) -> None:
    for client in (client_of(url), client_of(url, token=TOKEN), client_of(url, host="evil.example")):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert "server" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_answered(url: str, method: str) -> None:
    for path in ("/", "/nix"):
        assert client_of(url).request(method, path).status_code == 405
    assert client_of(url).request("HEAD", "/").status_code == 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.0.1", "[::1]", "run.localhost"])
def test_names_of_this_machine_are_answered(url: str, host: str) -> None:
    assert client_of(url, host=host).get("/").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "10.0.0.7", "localhost.evil.example", "127.0.0.1.nip.io", "[::2]"])
def test_other_names_are_refused_without_a_token(url: str, host: str) -> None:
    answer = client_of(url, host=host).get("/")
    assert answer.status_code == 421
    assert "run.db" not in answer.text.partition("<main")[2]


def test_a_token_is_asked_for(url: str) -> None:
    client = client_of(url, host="10.0.0.7", token=TOKEN)
    for path in ("/", "/groups", "/?token=wrong", "/?token="):
        assert client.get(path).status_code == 401
    assert client.get("/", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize("host", ["a/static/", "localhost/static/", "a?", "a@b", "a b", "[::1]/static/"])
@pytest.mark.parametrize("token", [None, TOKEN])
def test_no_host_header_opens_the_pages(url: str, host: str, token: str | None) -> None:
    answer = client_of(url, token=token).get("/groups", headers={"Host": host})
    assert answer.status_code == 400
    assert 'action="/groups"' not in answer.text


def test_a_token_is_kept_in_a_cookie_and_leaves_the_address(url: str) -> None:
    client = client_of(url, host="10.0.0.7", token=TOKEN)
    answer = client.get(f"/groups?order=uid&token={TOKEN}&size=3")
    assert (answer.status_code, answer.headers["location"]) == (303, "/groups?order=uid&size=3")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/groups").status_code == 200


def test_a_token_never_leads_to_another_host(url: str) -> None:
    client = client_of(url, token=TOKEN)
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


def test_names_of_this_machine() -> None:
    assert all(map(is_loopback, ("localhost", "LOCALHOST.", "127.0.0.1", "[::1]", "::1")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "10.0.0.7", "local.host", "localhost.com", "1.0.0.127")))


@pytest.mark.parametrize("filled", ["postgres"], indirect=True)
def test_the_password_is_shown_nowhere(filled: str) -> None:
    client = client_of(filled.replace("@", ":s3cret-word@", 1))
    for path in ("/", "/groups", "/nix"):
        answer = client.get(path)
        assert answer.status_code in (200, 404)
        assert "s3cret-word" not in answer.text
