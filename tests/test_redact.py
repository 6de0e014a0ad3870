"""Passwords in messages."""

from __future__ import annotations

import pytest

from replaybuf.errors import ConfigError
from replaybuf.redact import redact
from replaybuf.storage.sql.engine.urls import parse_url


@pytest.mark.parametrize("password", ["secret", "sec@ret", "@secret@", "sec/ret", "sec:ret", "se?c#ret", "sec\nret"])
def test_no_part_of_a_password_is_shown(password: str) -> None:
    assert redact(f"postgresql://rl:{password}@db:5432/run") == "postgresql://rl:***@db:5432/run"


def test_no_part_of_a_password_is_shown_of_a_refused_url() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url("postgresql://rl:sec@ret@db/run")
    assert "ret" not in str(caught.value)


def test_an_unreadable_url_shows_no_password() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url("postgresql://rl:secret@db:port/run")
    assert "secret" not in str(caught.value)
