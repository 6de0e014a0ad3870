"""Passwords in messages."""

from __future__ import annotations

import pytest

from replaybuf.common.redact import redact, redact_path


@pytest.mark.parametrize("password", ["secret", "sec@ret", "@secret@", "sec/ret", "sec:ret", "se?c#ret", "sec\nret"])
def test_no_part_of_a_password_is_shown(password: str) -> None:
    assert redact(f"postgresql://rl:{password}@db:5432/run") == "postgresql://rl:***@db:5432/run"


@pytest.mark.parametrize("sign", ["%3A", "%3a", "/", " ", "?", "#"])
def test_what_follows_a_mistyped_colon_is_not_shown(sign: str) -> None:
    assert redact(f"postgresql://rl{sign}secret@db/run") == "postgresql://***"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://rl@db/run",
        "sqlite:///run.db",
        "sqlite:run.db",
        "sqlite:/run.db",
        "postgresql://r%40l@db/run",
        "postgresql://@db",
        "a.b://h:1/",
    ],
)
def test_a_url_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert redact(url) == url


def test_a_folder_is_shown_as_it_is() -> None:
    assert redact_path("runs/2026-11-22T11:30") == "runs/2026-11-22T11:30"
