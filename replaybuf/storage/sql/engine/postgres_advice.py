"""What to do about PostgreSQL's refusals, and about poolers that aren't set up for replaybuf: data, by error code."""

from __future__ import annotations

import re

_TABLES = "what docs/postgresql-access.md grants (to write SELECT, INSERT, UPDATE and DELETE; SELECT is enough to look)"

#: Of error codes, the patterns of messages, and what to do; `{user}` is the role, `{0}` the pattern's first group.
_ADVICE: dict[str, list[tuple[str, str]]] = {
    "28P01": [
        (
            "",
            "give the one that holds now, in the url, or in a password file or by a function (passfile, password=), "
            "which are asked anew for each connection",
        )
    ],
    "28000": [
        (r"role .* does not exist", "create it: CREATE ROLE {user} LOGIN"),
        (r"not permitted to log in", "ALTER ROLE {user} LOGIN"),
        (r"valid client certificate", "give one, and its key: sslcert=FILE and sslkey=FILE"),
        (r"certificate authentication failed", "the name (CN) in the certificate must be the role's"),
        (
            r"no pg_hba.conf entry .*(?:no encryption|SSL off)",
            "connect by TLS (sslmode=verify-full), or let the server's pg_hba.conf admit this host",
        ),
        (r"no pg_hba.conf entry", "let the server's pg_hba.conf admit this host, role and database"),
    ],
    "55000": [(r"database (\S+) is not currently accepting", "ALTER DATABASE {0} ALLOW_CONNECTIONS true")],
    "42501": [
        (
            r"for schema (\S+)",
            "let the owner make the tables (replaybuf db upgrade URL) and GRANT USAGE ON SCHEMA {0} TO {user}; or, for "
            "this role to make them, GRANT USAGE, CREATE ON SCHEMA {0} TO {user}",
        ),
        (r"for (?:table|view|relation) (\S+)", f"on {{0}} the role {{user}} lacks {_TABLES}"),
        (r"for sequence (\S+)", "GRANT USAGE, SELECT, UPDATE ON SEQUENCE {0} TO {user}"),
        (r"for database (\S+)", "GRANT CONNECT ON DATABASE {0} TO {user}"),
        (r"must be owner of (?:\w+ )+(\S+)", "only the owner of {0} may do this: run it as that role"),
    ],
}

_SETTINGS = "docs/pgbouncer.md has the settings"
#: Errors of poolers, by what they say.
_POOLERS = [
    (
        r"statement pooling mode",
        f"set pool_mode = transaction: in statement mode there are no transactions ({_SETTINGS})",
    ),
    (r"unsupported startup parameter", f"let PgBouncer ignore it, by ignore_startup_parameters ({_SETTINGS})"),
    (
        r'prepared statement "__asyncpg_\w+" (?:does not exist|already exists)',
        f"behind a pooler in transaction mode add statement_cache_size=0 to the url ({_SETTINGS})",
    ),
]
_POOLER_CODES = ("08", "26000", "42P05")

#: PgBouncer's refusals have one code for all; what they mean, by what they say, and what to do.
_REFUSES_USER = [
    (
        r"no such user",
        "PgBouncer doesn't know the role {user}: write it and its password into its auth_file, or set auth_query",
    ),
    (
        r"server login (?:has been failing|failed).*(?:password|role|user|pg_hba|SASL|signature|authentication)",
        "the server refuses PgBouncer's own login: correct the password in its auth_file, or in [databases]",
    ),
    (r"(?:TLS|SSL)(?: connection)? required", "connect by TLS: sslmode=verify-full"),
    (r"TLS client certificate required", "give one, and its key: sslcert=FILE and sslkey=FILE"),
    (
        r"certificate (?:authentication failed|name mismatch)",
        "the name (CN) in the certificate must be the role's",
    ),
    (
        r"(?:password|SASL|PAM|LDAP|\"trust\") authentication failed|login rejected|empty password",
        "give the password that PgBouncer has for the role {user} in its auth_file, or by auth_query; what the url, a "
        "password file or a function says is asked anew for each connection",
    ),
]
_HAS_NO_ROOM = [
    (r"max_(?:client_conn|db_client_connections|user_client_connections)", "raise it in PgBouncer's settings"),
]
_IS_AWAY = [
    (
        r"no such database|bouncer config error",
        "does PgBouncer's section [databases] have this one, and does it name a user that PgBouncer knows?",
    ),
    (r"is disabled", "ENABLE it in PgBouncer's console"),
    (
        r"query_wait_timeout",
        "all connections of PgBouncer's pool were in use for too long, or the server is away: raise default_pool_size",
    ),
    (
        r"server login has been failing|server login failed|client_login_timeout|cannot connect to server",
        "PgBouncer is there, and can't log in to the server behind it: its log says why. Is the server running, and is "
        "the role's password in PgBouncer's auth_file the server's?",
    ),
    (r"shutting down|pause", "PgBouncer is being ended, or paused: RESUME it in its console, or start it again"),
]
_VIOLATION = "08P01"


def pooler_refuses_user(code: str, message: str) -> bool:
    """Return whether a pooler refuses the user or the password, or is refused itself by the server behind it."""
    return code == _VIOLATION and _first(_REFUSES_USER, message) is not None


def pooler_has_no_room(code: str, message: str) -> bool:
    """Return whether a pooler has as many clients as it allows."""
    return code == _VIOLATION and _first(_HAS_NO_ROOM, message) is not None


def _first(known: list[tuple[str, str]], message: str) -> tuple[re.Match[str], str] | None:
    found = ((re.search(pattern, message), text) for pattern, text in known)
    return next(((match, text) for match, text in found if match), None)


def is_about_pooler(code: str, message: str) -> bool:
    """Return whether an error is that of a pooler which isn't set up for replaybuf."""
    return code.startswith(_POOLER_CODES) and any(re.search(pattern, message) for pattern, _ in _POOLERS)


def advice(code: str, message: str, user: str | None) -> str:
    """Return what to do about an error, as the rest of a sentence; nothing when there is nothing to say."""
    known = _ADVICE.get(code, [])
    if is_about_pooler(code, message):
        known = _POOLERS
    elif code == _VIOLATION:
        known = [*_REFUSES_USER, *_HAS_NO_ROOM, *_IS_AWAY]
    if found := _first(known, message):
        match, text = found
        return f"; {text.format(*match.groups(), user=user or 'of this process')}"
    return ""
