"""Database URLs: checking them, their options, and several hosts of a PostgreSQL cluster.

Several hosts have the syntax of libpq and asyncpg, `postgresql://a:5432,b:5433/rl`. A parsed URL has them as the
option `host=a:5432,b:5433`.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from sqlalchemy import exc
from sqlalchemy.engine import URL, make_url

from replaybuf.common.redact import may_hold_password, redact
from replaybuf.errors import ConfigError, MissingDriverError

# Several hosts


class Host(NamedTuple):
    """A server by its address, or by the folder of its socket; without a port, the driver's default."""

    name: str
    port: int | None = None

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name  # an IPv6 address
        return name if self.port is None else f"{name}:{self.port}"


_EXAMPLE = "several are written postgresql://user@a:5432,b:5433/database"
_SIGNS = "in a user or password : is written %3A, / %2F, @ %40, ? %3F, # %23, and % %25"
# Up to the last @ before the path, since a password may have one, too.
_URL_PARTS = re.compile(r"(postgres(?:ql)?(?:\+asyncpg)?)://((?:[^/?#]*@)?)([^/?#@]*)(.*)", re.DOTALL)
_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]*)(?::(.*))?", re.DOTALL)
_PLACEHOLDER = "hosts.invalid"
_PORTS = range(1, 65536)


def hosts_as_options(url: str) -> str:
    """Return a URL with several hosts as the option `host`; any other URL unchanged. Raises ConfigError."""
    match = _URL_PARTS.fullmatch(url)
    if match is None:
        return url
    scheme, user, hosts, path = match.groups()
    if hosts.rpartition("]")[2].count(":") == 1 or "," in hosts:
        _read_hosts(hosts.split(","))
    if "," not in hosts:
        return url
    path = path if path.startswith("/") else f"/{path}"
    return f"{scheme}://{user}{path}{'&' if '?' in path else '?'}host={quote(hosts)}"


def _split_option(option: str | Sequence[str]) -> list[str]:
    values = [option] if isinstance(option, str) else option
    return [part for value in values for part in value.split(",")] if any(values) else []


def _read_hosts(texts: Sequence[str]) -> list[Host]:
    """Return hosts. Raises ConfigError.

    Errors quote nothing, since what seems to be a host or a port may be a part of a password.
    """
    hosts = []
    for text in map(unquote, texts):
        match = _HOST.fullmatch(text)
        name, port = match.groups() if match else ("", None)
        if not (name or len(texts) == 1) or not re.fullmatch("[0-9]{0,5}", port or "") or int(port or 1) not in _PORTS:
            raise ConfigError(
                f"a host of the url must be a name, or a name and a port from 1 to 65535; {_EXAMPLE}; {_SIGNS}"
            )
        hosts.append(Host(name.strip("[]"), int(port) if port else None))
    return hosts


def hosts_of(url: URL) -> list[Host]:
    """Return the hosts of a parsed URL that has several; an empty list for any other."""
    names = _split_option(url.query.get("host", ""))
    return _read_hosts(names) if len(names) > 1 else []


def written(url: URL) -> str:
    """Return a parsed URL in the users' syntax, with its password hidden."""
    hosts, url = hosts_of(url), url.set(drivername=url.get_backend_name())
    if not hosts:
        return url.render_as_string(hide_password=True)
    text = url.difference_update_query(["host"]).set(host=_PLACEHOLDER).render_as_string(hide_password=True)
    return text.replace(_PLACEHOLDER, ",".join(quote(str(host), safe=":[]") for host in hosts), 1)


# URLs

# Signs of a URL, which may hold a password, in a file path.
_URL_SIGNS = re.compile("[:@=?]")
_EXPECTED = "sqlite:///FILE or postgresql://user@host/database"


def parse_url(url: str) -> URL:
    """Return the URL of a database from user input, with the driver filled in.

    Accepts `sqlite:///run.db`, `postgresql://...`, `postgres://...`, both also with several hosts, and for SQLite in
    memory `sqlite:///:memory:`, `sqlite://` and `memory://`; `~` is the home folder. Raises ConfigError for anything
    else, and MissingDriverError when the driver isn't installed. Messages never show a refused URL: the error may be
    next to its password.
    """
    if not isinstance(url, str) or not url:
        raise ConfigError("the url is empty; write for example sqlite:///run.db or postgresql://user@host/database")
    url = url.rstrip("\r\n")  # of a block of YAML
    parsed = _parse_url(hosts_as_options(url))
    if parsed is None:
        hint = "" if _URL_SIGNS.search(url) else f"; for a file write sqlite:///{url}"
        raise ConfigError(f"can't read the database url: expected {_EXPECTED}{hint}")
    if parsed.drivername == "memory":
        return make_url("sqlite:///:memory:")
    if parsed.drivername == "sqlite":
        if parsed.host:
            raise ConfigError("the sqlite url has a host; a relative file is sqlite:///run.db, an absolute one has 4 /")
        if "?" in url:
            raise ConfigError("SQLite urls take no options; a ? in the name of a file is written %3F")
        if "\x00" in (parsed.database or ""):
            raise ConfigError("the url holds a NUL, which no file name can have")
        path = os.path.expanduser(parsed.database or ":memory:")
        return parsed.set(database=path)
    if parsed.drivername in ("postgresql", "postgres", "postgresql+asyncpg"):
        if importlib.util.find_spec("asyncpg") is None:
            raise MissingDriverError("PostgreSQL needs the driver asyncpg, which is not installed: pip install asyncpg")
        _check_parts(url, parsed)
        return _checked_postgres(parsed.set(drivername="postgresql+asyncpg"))
    raise ConfigError(f"{parsed.drivername!r} is not supported; use {_EXPECTED}")


def url_or_path(url: str) -> URL:
    """Return the parsed URL, or the URL of the SQLite file at a path. Raises the errors of `parse_url`."""
    if not url or "://" in url:
        return parse_url(url)
    if _URL_SIGNS.search(url) and not os.path.exists(url):  # a mistyped URL, rather than a new file with such a name
        raise ConfigError(
            f"there is no such file, and it is no url: expected {_EXPECTED} (a new file with one of :@=? in its path "
            "needs the sqlite:///)"
        )
    return parse_url("sqlite://").set(database=url)


def _parse_url(url: str) -> URL | None:
    # (The exceptions may quote parts of the URL; returning None here drops them.)
    try:
        url.encode()  # no name has half of a surrogate pair
        return make_url(url)
    except (exc.ArgumentError, ValueError):
        return None


def is_memory(url: URL) -> bool:
    """Return whether the URL names a SQLite database in memory."""
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def at_absolute_path(url: URL) -> URL:
    """Return the URL of a SQLite file with an absolute path, because the working directory may change; else the same.

    (Not `abspath`: the system resolves `..` after symbolic links.)
    """
    if url.get_backend_name() != "sqlite" or is_memory(url):
        return url
    return url.set(database=str(Path(url.database or "").absolute()))


def public_url(url: URL) -> str:
    """Return the URL for messages: without driver and password, and with no options but the hosts."""
    if is_memory(url):
        return "sqlite:///:memory:"
    if url.get_backend_name() == "sqlite" and may_hold_password(url.database or ""):
        return f"sqlite:///{redact(url.database or '')}"
    places = {name: value for name, value in url.query.items() if name in ("host", "port")}
    return redact(written(url.set(query=places)))


#: Options with numbers, the arguments of asyncpg that they are, and their defaults: the seconds for making a connection
#: (and for a password function's answer), and for a statement; the number of prepared statements that are kept.
_NUMBERS = {
    "connect_timeout": ("timeout", 10.0),
    "command_timeout": ("command_timeout", 600.0),
    "statement_cache_size": ("statement_cache_size", 100),
}
#: Options that name files.
_FILES = {"passfile", "sslrootcert", "sslcert", "sslkey", "sslcrl"}
#: Options of libpq that asyncpg lacks, or that are decided here: who writes follows the primary, who reads prefers it.
_IGNORED_OPTIONS = ("channel_binding", "gssencmode", "target_session_attrs")


def _last_value(values: str | Sequence[str]) -> str:
    return values if isinstance(values, str) else values[-1]


def _check_parts(url: str, parsed: URL) -> None:
    """Raise ConfigError when a user, password or host is in the place of another part of the URL."""
    database = parsed.database or ""
    if (
        "@" in (parsed.host or "")
        or ("@" in (parsed.username or "") and "%40" not in url)
        or any(sign in database and quote(sign) not in url for sign in "@:")
        or "password=" in database
    ):
        raise ConfigError(
            f"the url has a sign of another part: expected postgresql://user:password@host/database?options; {_SIGNS}"
        )


def _checked_postgres(url: URL) -> URL:
    """Return the URL with hosts, port and numbers that are valid, without options that are ignored. Raises ConfigError.

    All other options are asyncpg's, with the defaults of libpq (the environment, ~/.postgresql, ~/.pgpass), or settings
    of the server, which refuses those that it doesn't know.
    """
    query: dict[str, Any] = {name: value for name, value in url.query.items() if name not in _IGNORED_OPTIONS}
    if not query.keys().isdisjoint(("user", "password")):
        raise ConfigError("the PostgreSQL url: user and password are before the host, as in user:password@host")
    for name in _FILES & query.keys():  # the working directory may change before a connection
        if (file := _last_value(query[name])) not in ("", "system"):
            query[name] = os.path.abspath(file)
    if len(hosts := _split_option(query.get("host", ""))) > 1:
        query["host"] = ",".join(map(str, _read_hosts(hosts)))
    if "port" in query:
        [(_, port)] = _read_hosts([f":{_last_value(query['port'])}"])
        if url.host:
            url, _ = url.set(port=url.port or port), query.pop("port")
    url = url.set(query=query)
    _numbers(url)
    return url


def _numbers(url: URL) -> dict[str, float]:
    """Return the arguments of asyncpg that are numbers. Raises ConfigError."""
    arguments = {}
    for name, (argument, default) in _NUMBERS.items():
        try:
            number = type(default)(_last_value(url.query.get(name, str(default))))
        except ValueError:
            number = math.nan
        if not number > (-1 if name == "statement_cache_size" else 0):
            raise ConfigError(f"the PostgreSQL url: the option {name} must be a number larger than 0")
        arguments[argument] = number
    return arguments


def driver_arguments(url: URL, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `asyncpg.connect` for a PostgreSQL URL, with these settings of the connection."""
    arguments: dict[str, Any] = _numbers(url)
    if _last_value(url.query.get("sslrootcert", "")) == "system":  # the CAs that this machine trusts
        arguments["ssl"] = True  # as verify-full
        url = url.difference_update_query(["sslrootcert"])
    hosts = [] if url.host else _split_option(url.query.get("host", ""))
    if hosts and all(host.startswith("/") for host in hosts):  # Unix sockets have no TLS
        arguments["ssl"] = False
    settings = {"application_name": _last_value(url.query.get("application_name", "replaybuf")), **settings}
    dsn = url.set(drivername="postgresql").difference_update_query([*_NUMBERS, "application_name"])
    return {**arguments, "dsn": dsn.render_as_string(hide_password=False), "server_settings": settings}
