"""Passwords that may change during a run: returned by a user's function, or read from a password file.

Both are used before each new connection. Passwords aren't cached, and appear in no message.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import re
import stat
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from replaybuf.errors import ConfigError, UnreachableError
from replaybuf.redact import redact_words

T = TypeVar("T")

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
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"password {_EXPECTED} (there is no such module)") from None
        if isinstance(error, AttributeError) and module in sys.modules:
            raise ConfigError(f"password {_EXPECTED} (the module has no such function)") from None
        said = redact_words(str(error))
        raise ConfigError(f"the module of the password function raised {type(error).__name__}: {said}") from error
    if not callable(function):
        raise ConfigError(f"password {_EXPECTED} (what this text names can't be called)")
    return function  # type: ignore[no-any-return]


def name_of(function: PasswordFunction) -> str:
    """Return the name of a function for messages. (The repr of a partial function would show its arguments.)"""
    named: Any = function
    while (inner := getattr(named, "func", None)) is not None:
        named = inner
    if not hasattr(named, "__qualname__"):
        named = type(named)
    return f"{named.__module__}:{named.__qualname__}"


async def ask(function: PasswordFunction, seconds: float) -> str:
    """Return the password from a function, which may block for up to `seconds`. Raises NoPasswordError."""
    name = name_of(function)
    try:
        async with asyncio.timeout(seconds) as limit:
            answer = await in_thread(function)
            if inspect.isawaitable(answer):
                answer = await answer
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise NoPasswordError(f"the password function {name} gave no answer within {seconds:g} s") from error
        said = f"{type(error).__name__}: {redact_words(str(error))}"
        raise NoPasswordError(f"the password function {name} raised {said}") from error
    if not isinstance(answer, str) or not answer:
        what = "an empty text" if answer == "" else f"a value of the type {type(answer).__name__}, not a text"
        raise NoPasswordError(f"the password function {name} returned {what}")
    return answer


async def in_thread(function: Callable[[], T]) -> T:
    """Return the result of a blocking function, run in a daemon thread, which doesn't delay the end of the process."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    answers: list[T] = []  # not a future's result, which asyncio's debug log would show
    errors: list[BaseException] = []

    def call() -> None:
        try:
            answers.append(function())
        except BaseException as error:
            errors.append(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=call, name="replaybuf-password", daemon=True).start()
    await done.wait()
    if errors:
        raise errors[0]
    return answers[0]


# Password files, as libpq's: https://www.postgresql.org/docs/current/libpq-pgpass.html

# A field, up to a colon that has no backslash before it.
_FIELD = re.compile(r"((?:\\.|[^\\:])*)(?::|$)")


def default_passfile() -> Path | None:
    """Return the path of the default password file, if it exists and other users can't read it."""
    with contextlib.suppress(RuntimeError, KeyError, OSError):  # no home directory
        path = Path(os.environ.get("PGPASSFILE") or Path.home() / ".pgpass")
        if path.is_file() and not _is_open(path):
            return path
    return None


def check_passfile(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError for a password file that is missing, unreadable, or readable by other users."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"passfile: {path} can't be read: {error.strerror}") from None
    if _is_open(Path(path)):
        raise ConfigError(f"passfile: {path} can be read by others; allow nobody else to: chmod 600 {path}")


def _is_open(path: Path) -> bool:
    return os.name == "posix" and bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def password_in(
    path: str | os.PathLike[str], places: Sequence[tuple[str, str]], database: str, user: str
) -> str | None:
    """Return the password of the first of these hosts and ports that a password file lists; None if it lists none.

    Raises ConfigError as `check_passfile` does.
    """
    check_passfile(path)
    try:
        lines = list(_lines(Path(path).read_text("utf-8")))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"passfile: {path} can't be read: {type(error).__name__}") from None
    for host, port in places:
        wanted = ("localhost" if host.startswith("/") else host, port, database, user)
        for fields in lines:
            if all(field in ("*", value) for field, value in zip(fields[:4], wanted, strict=True)):
                return fields[4]
    return None


def _lines(text: str) -> Iterator[list[str]]:
    """Yield the five fields of each line, with escaped colons and backslashes decoded."""
    for line in text.splitlines():
        fields = [re.sub(r"\\(.)", r"\1", field) for field in _FIELD.findall(line)]
        if len(fields) >= 5 and fields[4] and not line.startswith("#"):
            yield fields[:5]
