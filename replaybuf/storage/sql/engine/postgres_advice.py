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
    # Of PgBouncer, which may pass by themselves.
    "08P01": [
        ("max_client_conn", "raise it in PgBouncer's settings, or open fewer buffers at once"),
        ("bouncer config error|no such database", "does PgBouncer's section [databases] have this one?"),
    ],
    "55000": [(r"database (\S+) is not currently accepting", "ALTER DATABASE {0} ALLOW_CONNECTIONS true")],
    "42501": [
        (
            r"for schema (\S+)",
            "let the owner make the tables (replaybuf db upgrade URL) and GRANT USAGE ON SCHEMA {0} TO {user}",
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


def is_about_pooler(code: str, message: str) -> bool:
    """Return whether an error is that of a pooler which isn't set up for replaybuf."""
    return code.startswith(_POOLER_CODES) and any(re.search(pattern, message) for pattern, _ in _POOLERS)


def advice(code: str, message: str, user: str | None) -> str:
    """Return what to do about an error, as the rest of a sentence; nothing when there is nothing to say."""
    known = _POOLERS if is_about_pooler(code, message) else _ADVICE.get(code, [])
    for pattern, text in known:
        if found := re.search(pattern, message):
            return f"; {text.format(*found.groups(), user=user or 'of this process')}"
    return ""
