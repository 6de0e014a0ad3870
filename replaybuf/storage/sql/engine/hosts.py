"""Several hosts in the URL of a PostgreSQL cluster, as libpq and asyncpg write them: `postgresql://a:5432,b:5433/rl`.

A parsed URL has them as the options `host=a,b` and `port=5432,5433`, which SQLAlchemy reads, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

from sqlalchemy.engine import URL

from replaybuf.errors import ConfigError


class Host(NamedTuple):
    """A server by its address, or by the folder of its socket; without a port, the driver's default."""

    name: str
    port: int | None = None

    def __str__(self) -> str:
        return self.quoted if self.port is None else f"{self.quoted}:{self.port}"

    @property
    def quoted(self) -> str:
        """The name, an IPv6 address in brackets."""
        return f"[{self.name}]" if ":" in self.name else self.name


#: Which of a cluster's servers a URL asks for (libpq's `target_session_attrs`).
SESSION_ATTRS = ("any", "read-write", "primary", "read-only", "standby", "prefer-standby")
_ATTRS = "target_session_attrs"
_EXAMPLE = "several are written postgresql://user@a:5432,b:5433/database"
# Up to the last @ before the path: what is before it may be a password.
_PARTS = re.compile(r"(postgres(?:ql)?(?:\+asyncpg)?|pgsql)://((?:[^/?#]*@)?)([^/?#@]*)(.*)", re.DOTALL)
_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]*)(?::(.*))?", re.DOTALL)
_PLACE = "hosts.invalid"


def hosts_as_options(url: str) -> str:
    """Return a URL that has several hosts where others have one, with those as options instead. Raises ConfigError."""
    found = _PARTS.fullmatch(url)
    if found is None:
        return url
    scheme, user, listed, rest = found.groups()
    # What follows an @, and is followed by none, is no part of a password. Without any @, what seems to be a port may
    # be one.
    shown = "" if "@" in rest else "{host}:{port}" if user else "{host}"
    if "," not in listed:
        if listed.rpartition("]")[2].count(":") == 1:
            _read([listed], shown)  # its port, about which the parser of URLs says nothing that helps
        return url
    hosts = _read(listed.split(","), shown)
    if not rest.startswith("/"):
        rest = f"/{rest}"
    if re.search(r"[?&](host|port)=", rest):
        raise ConfigError(f"the url names hosts in two places: leave out the options host and port; {_EXAMPLE}")
    options = "&".join(f"{name}={quote(value)}" for name, value in _options(hosts).items())
    return f"{scheme}://{user}{rest}{'&' if '?' in rest else '?'}{options}"


def checked_options(query: Mapping[str, str | Sequence[str]]) -> dict[str, str | Sequence[str]]:
    """Return the options of a URL with several hosts in one form. Raises ConfigError."""
    wanted = query.get(_ATTRS)
    if wanted is not None and wanted not in SESSION_ATTRS:
        raise ConfigError(f"the PostgreSQL url: {_ATTRS} must be one of {', '.join(SESSION_ATTRS)}")
    listed = _listed(query.get("host", ""))
    if len(listed) < 2:
        return dict(query)
    hosts, ports = _read(listed), _listed(query.get("port", ""))
    if ports:
        if len(ports) not in (1, len(hosts)) or any(host.port is not None for host in hosts):
            raise ConfigError(
                f"the url has {len(hosts)} hosts and {len(ports)} ports: give one for all, or one for each"
            )
        ports = ports * len(hosts) if len(ports) == 1 else ports
        hosts = [
            Host(host.name, _port(port, f"of the host in place {place} of the url", f"{host.name}:{port[:20]}"))
            for place, (host, port) in enumerate(zip(hosts, ports, strict=True), start=1)
        ]
    return {**query, **_options(hosts)}


def hosts_of(url: URL) -> list[Host]:
    """Return the hosts of a parsed URL that has several; none for any other."""
    names, ports = _listed(url.query.get("host", "")), _listed(url.query.get("port", ""))
    if len(names) < 2:
        return []
    return [Host(name.strip("[]"), int(port) if port else None) for name, port in zip(names, ports, strict=True)]


def session_attrs(url: URL) -> str | None:
    """Return which of the servers the URL asks for, None if it doesn't say."""
    return next(iter(_listed(url.query.get(_ATTRS, ""))), None)


def written(url: URL) -> str:
    """Return a parsed URL as users write it, with its password hidden."""
    hosts, url = hosts_of(url), url.set(drivername=url.get_backend_name())
    if not hosts:
        return url.render_as_string(hide_password=True)
    text = url.difference_update_query(["host", "port"]).set(host=_PLACE).render_as_string(hide_password=True)
    return text.replace(_PLACE, ",".join(quote(str(host), safe=":[]") for host in hosts), 1)


def url_at(url: URL, host: Host | None) -> URL:
    """Return the URL of one of its hosts; of None, as it is."""
    if host is None:
        return url
    url = url.difference_update_query(["host", "port", _ATTRS])
    if not host.name.startswith("/"):
        return url.set(host=host.name, port=host.port)
    return url.update_query_dict({"host": host.name} | ({} if host.port is None else {"port": str(host.port)}))


def _listed(option: str | Sequence[str]) -> list[str]:
    values = [option] if isinstance(option, str) else option
    return [one for value in values for one in value.split(",")] if any(values) else []


def _options(hosts: Sequence[Host]) -> dict[str, str]:
    ports = ("" if host.port is None else str(host.port) for host in hosts)
    return {"host": ",".join(host.quoted for host in hosts), "port": ",".join(ports)}


def _read(listed: Sequence[str], shown: str = "") -> list[Host]:
    """Return hosts with their ports; of one whose port is wrong, errors show what `shown` has of `host` and `port`."""
    hosts = []
    for place, text in enumerate(map(unquote, listed)):
        if text.startswith("/"):
            hosts.append(Host(text))
            continue
        found = _HOST.fullmatch(text)
        if found is None or not (found[1] or len(listed) == 1):
            raise ConfigError(f"the host in place {place + 1} of the url has no name that can be read; {_EXAMPLE}")
        which = f"of the host in place {place + 1} of the url" if len(listed) > 1 else "in the url"
        known = shown.format(host=found[1], port=(found[2] or "")[:20])
        hosts.append(Host(found[1].strip("[]"), _port(found[2], which, known)))
    return hosts


def _port(text: str | None, which: str, known: str = "") -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        given = f" ({known})" if known else ""
        raise ConfigError(f"the port {which} must be a number from 1 to 65535{given}")
    return int(text)
