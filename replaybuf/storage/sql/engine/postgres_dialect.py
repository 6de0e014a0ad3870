"""The SQL of PostgreSQL, where the two databases differ."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from sqlalchemy.dialects.postgresql import asyncpg

from replaybuf.storage.sql.engine.dialect import Dialect


def texts(values: Iterable[object]) -> list[str | None]:
    """Return values as the parameter of an `array`."""
    return [None if value is None else str(value) for value in values]


def array(parameter: str, kind: str) -> str:
    """Return SQL for an array of this type whose parameter is an array of texts.

    For any other array, asyncpg asks the server about its type, once for each connection. That costs the server more
    than all else that a connection needs.
    """
    return f"CAST(CAST({parameter} AS text[]) AS {kind}[])"


_PARAMETER = re.compile(r"\$(\d+)")


def inlined(sql: str, values: Sequence[Any]) -> str:
    """Return a statement with its values in it: literals have no type of their own, as parameters have none."""
    return _PARAMETER.sub(lambda match: _literal(values[int(match[1]) - 1]), sql)


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    # Not NULL in the text of an array: where array_nulls is off, that is a text.
    if isinstance(value, list) and (None in value or not value):
        return f"ARRAY[{','.join(map(_literal, value))}]"
    if isinstance(value, (bytes, bytearray)):
        return f"decode('{b64encode(value).decode()}', 'base64')"
    text = _array_text(value) if isinstance(value, list) else str(value)
    # Nothing is escaped between such tags: backslashes took a sixth of the server's time for many small groups.
    tag = "$_$"
    while tag in f"{text}{tag[:-1]}":
        tag = f"$_{tag[1:]}"
    return f"{tag}{text}{tag}"


def _array_text(values: Sequence[Any]) -> str:
    """Return the text of an array without NULL. Strings are quoted together, separated by NUL, which no text has."""
    text = "\0".join(map(str, values)).replace("\\", r"\\").replace('"', r"\"").replace("\0", '","')
    return f'{{"{text}"}}'


#: The time in seconds since the epoch.
NOW = "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


_RELATIONS = "FROM pg_class WHERE relnamespace = CAST(current_schema() AS regnamespace) AND relkind"


class PostgresDialect(Dialect):
    name = "postgresql"
    compiler = asyncpg.dialect(paramstyle="named")  # type: ignore[no-untyped-call]
    is_remote = True
    parameter = "$"
    macros: ClassVar = {
        "in": f"= ANY ({array('{}', 'bigint')})",
        "in_texts": "= ANY (CAST({} AS text[]))",
        "each": f"(SELECT unnest({array('{}', 'bigint')}) AS value)",
        "json": "CAST({} AS jsonb)",
        "moment": f"CAST({{}} AS double precision) * 0 + {NOW}",
        # In a subquery, evaluated once: a volatile function would rule out an index.
        "clock": f"coalesce(CAST({{}} AS double precision), (SELECT {NOW}))",
        "lock_of": "FOR UPDATE OF {}",
        "lock": "FOR UPDATE",
        "skip": "FOR UPDATE SKIP LOCKED",
        "insert": "INSERT",
        "shard": "pg_backend_pid()",
        "draw": "(SELECT currval(pg_get_serial_sequence('rb_batch', 'id')))",
        "tables": f"SELECT relname {_RELATIONS} IN ('r', 'p')",
        "views": f"SELECT relname {_RELATIONS} = 'v'",
        "set_last_uid": "SELECT setval('rb_uid', greatest(CAST({0} AS bigint), 1), CAST({0} AS bigint) > 0)",
    }

    def listed(self, values: Iterable[int] | Iterable[str]) -> Any:
        return texts(values)


POSTGRES = PostgresDialect()
