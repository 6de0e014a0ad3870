"""Passwords that a user's function returns, before each new connection. They aren't cached, and are in no message."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import Any

from replaybuf.common.cancellation import in_daemon_thread
from replaybuf.common.redact import redact_words
from replaybuf.errors import ConfigError, UnreachableError

#: Returns a password, or a coroutine that does.
PasswordFunction = Callable[[], str | Awaitable[str]]

#: The environment variable that names a function, for commands and readers that have only a URL.
VARIABLE = "REPLAYBUF_PASSWORD"

_EXPECTED = (
    "must be a function, or a text module:function that names one; a password itself belongs into a password file "
    "(passfile), into PGPASSWORD or into the url"
)


class NoPasswordError(UnreachableError):
    """The password for a new connection can't be had at the moment."""


def password_function(given: Any) -> PasswordFunction:
    """Return a function, or import one named by a text. Raises ConfigError, which doesn't quote the text."""
    if callable(given):
        return given  # type: ignore[no-any-return]
    module, colon, name = given.partition(":") if isinstance(given, str) else ("", "", "")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise ConfigError(f"password {_EXPECTED}")
    try:
        function = attrgetter(name)(importlib.import_module(module))
    except Exception as error:
        raise ConfigError(f"password {_EXPECTED} (its import raised {type(error).__name__})") from None
    if not callable(function):
        raise ConfigError(f"password {_EXPECTED} (it names a {type(function).__name__})")
    return function  # type: ignore[no-any-return]


def name_of(function: PasswordFunction) -> str:
    """Return the name of a function for messages. (The repr of a partial function would show its arguments.)"""
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


async def ask(function: PasswordFunction, seconds: float) -> str:
    """Return the password from a function, which may block for up to `seconds`. Raises NoPasswordError."""
    name = name_of(function)
    try:
        async with asyncio.timeout(seconds) as limit:
            answer = await in_daemon_thread(function)
            if inspect.isawaitable(answer):
                answer = await answer
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise NoPasswordError(f"the password function {name} gave no answer within {seconds:g} s") from error
        text = f"{type(error).__name__}: {redact_words(str(error))}"
        raise NoPasswordError(f"the password function {name} raised {text}") from error
    if not isinstance(answer, str) or not answer:
        raise NoPasswordError(f"the password function {name} returned no text, or an empty one")
    return answer
