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
        (r'role "(.*)" does not exist', "create it: CREATE ROLE {0} LOGIN"),
        (r'role "(.*)" is not permitted to log in', "ALTER ROLE {0} LOGIN"),
        (r"valid client certificate", "give one, and its key: sslcert=FILE and sslkey=FILE"),
        (r"certificate authentication failed", "the name (CN) in the certificate must be the role's"),
        (
            r"no pg_hba.conf entry .*(?:no encryption|SSL off)",
            "connect by TLS (sslmode=verify-full), or let the server's pg_hba.conf admit this host",
        ),
        (r"no pg_hba.conf entry", "let the server's pg_hba.conf admit this host, role and database"),
    ],
    "53300": [("", "raise its max_connections (or the CONNECTION LIMIT of the role or the database)")],
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

_VIOLATION = "08P01"
#: PgBouncer has one code for all that it refuses, and for all that the server refuses it. By what they say: the code
#: that PostgreSQL has for the same, and what to do; None: the same as for PostgreSQL's.
_PGBOUNCER: list[tuple[str, str, str | None]] = [
    (
        r"no such user",
        "28000",
        "PgBouncer doesn't know the role {user}: write it and its password into its auth_file, or set auth_query",
    ),
    (
        r"authentication failed for user|server login .*(?:password|SASL|signature)",
        "28P01",
        "the server behind PgBouncer refuses its login: correct the password in its auth_file, or in [databases]",
    ),
    (
        r"(?:password|SASL|PAM|LDAP|\"trust\") authentication failed|login rejected|empty password",
        "28P01",
        "give the password that PgBouncer's auth_file, or auth_query, has for the role {user}, if it knows that role",
    ),
    (r"TLS client certificate required", "28000", "give one, and its key: sslcert=FILE and sslkey=FILE"),
    (r"(?:TLS|SSL)(?: connection)? required", "28000", "connect by TLS: sslmode=verify-full"),
    (r"certificate name mismatch", "28000", "the name (CN) in the certificate must be the role's"),
    (r'role ".*" (?:does not exist|is not permitted)|no pg_hba.conf entry|certificate authentication', "28000", None),
    (r'database ".*" does not exist', "3D000", None),
    (r"is not currently accepting connections", "55000", None),
    (r"too many connections for|too many clients|connection slots are reserved", "53300", None),
    (
        r"max_(?:client_conn|db_client_connections|user_client_connections)",
        "53300",
        "raise it in PgBouncer's settings",
    ),
    (
        r"no such database|bouncer config error",
        _VIOLATION,
        "does PgBouncer's section [databases] have this one, with a user that it knows?",
    ),
    (r"database .* is disabled", _VIOLATION, "ENABLE it in PgBouncer's console"),
    (
        r"query_wait_timeout",
        _VIOLATION,
        "PgBouncer had no connection to the server for so long: is the server running? If it is, all were in use: "
        "raise default_pool_size",
    ),
    (
        r"server login|client_login_timeout|cannot connect to server",
        _VIOLATION,
        "PgBouncer is there, and can't log in to the server behind it, as its log says: is that running, and does it "
        "take the password in PgBouncer's auth_file?",
    ),
    (r"shutting down|pause", _VIOLATION, "start PgBouncer again, or RESUME the database in its console"),
]


def meant(code: str, message: str) -> str:
    """Return PostgreSQL's code for what an error says, also where PgBouncer has one of its own."""
    of_pooler = _of_pgbouncer(message) if code == _VIOLATION else None
    return code if of_pooler is None else of_pooler[1]


def _of_pgbouncer(message: str) -> tuple[str, str, str | None] | None:
    return next((one for one in _PGBOUNCER if re.search(one[0], message)), None)


def is_about_pooler(code: str, message: str) -> bool:
    """Return whether an error is that of a pooler which isn't set up for replaybuf."""
    return code.startswith(_POOLER_CODES) and any(re.search(pattern, message) for pattern, _ in _POOLERS)


def advice(code: str, message: str, user: str | None) -> str:
    """Return what to do about an error, as the rest of a sentence; nothing when there is nothing to say."""
    known = _POOLERS if is_about_pooler(code, message) else _ADVICE.get(meant(code, message), [])
    if known is not _POOLERS and code == _VIOLATION and (of_pooler := _of_pgbouncer(message)) and of_pooler[2]:
        known = [(of_pooler[0], of_pooler[2])]
    for pattern, text in known:
        if found := re.search(pattern, message):
            return f"; {text.format(*found.groups(), user=user or 'of this process')}"
    return ""
