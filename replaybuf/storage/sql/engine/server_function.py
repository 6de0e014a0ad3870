"""Write transactions as one call of a PostgreSQL function: one round trip, where statements need three.

Such a function locks WRITERS first. At the level READ COMMITTED each of its statements has its own snapshot, so
statements after the lock see all earlier commits. At other levels, which may be a role's or database's default, it
does nothing.

The answer to a call also confirms its commit. If it is lost, the commit stamp shows whether there was a commit
(`engine.outage`), and the function has stored its answer with the stamp. A call that is still unread when its
connection is lost must not run later: the connection holds its own lock for its whole life, not only in transactions,
so its server process is found and terminated before the stamp is read. Behind a pooler that isn't possible.

A function's name has a hash of its definition: other versions of replaybuf use other functions.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from sqlalchemy import text

from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.errors import says_unknown
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.outage import MARK
from replaybuf.storage.sql.engine.transaction import Prepared, Transaction

#: A statement's parameters have the types of their CASTs.
_CAST = re.compile(r"CAST\(:(\w+) AS ([\w ]+(?:\(\d+\))?(?:\[\])?)\)")
_PARAMETER = re.compile(r"(?<!:):(\w+)")
#: The name prefix of all functions of all versions.
PREFIX = "rb_call_"
#: Hex digits of the hash in a name.
_DIGITS = 8

_logger = logging.getLogger("replaybuf.database")


@dataclass(frozen=True)
class ServerFunction:
    """A statement, the `lock` before it, and its parameters' `names` in their order, those of `MARK` last.

    The statement writes the commit stamp if it changes anything. It returns a row with its answer, an array of numbers,
    or no row if it changed nothing. `lock` is PL/pgSQL.
    """

    what: str
    lock: str
    statement: str
    names: Sequence[str]

    @cached_property
    def name(self) -> str:
        """The function's name in the database."""
        digest = hashlib.sha256(self._definition("").encode()).hexdigest()
        return f"{PREFIX}{self.what}_{digest[:_DIGITS]}"

    @cached_property
    def call(self) -> Prepared:
        """The statement that calls the function."""
        given = ", ".join(f":{name}" for name in self.names)
        return Prepared(lambda _: text(f"SELECT {self.name}({given})"), *self.names)

    @property
    def definition(self) -> str:
        """The statement that creates the function."""
        return self._definition(self.name)

    def _definition(self, name: str) -> str:
        types = dict(_CAST.findall(self.lock + self.statement))
        taken = ", ".join(types[name] for name in self.names)
        body = f"""
DECLARE
    answer bigint[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN NULL;
    END IF;
    PERFORM pg_advisory_xact_lock_shared({Lock.WRITERS:d});
    {self.lock}
    {self.statement} INTO answer;
    IF answer IS NOT NULL THEN
        INSERT INTO rb_info (name, value) VALUES (:{MARK[0]}, array_to_string(answer, ' '))
        ON CONFLICT (name) DO UPDATE SET value = excluded.value;
    END IF;
    RETURN answer;
END
"""  # noqa: S608
        body = _PARAMETER.sub(lambda found: f"${self.names.index(found[1]) + 1}", body)
        return f"CREATE FUNCTION {name}({taken}) RETURNS bigint[] LANGUAGE plpgsql AS $body${body}$body$"


# On the server


async def bring_up(engine: Database, functions: Sequence[ServerFunction], *, replaces: bool = False) -> None:
    """Create these functions where missing, as far as this role may; they save round trips.

    They are optional, so an error is only logged. With `replaces`, functions of other versions are dropped, and
    processes of those versions use statements instead; errors are raised, except about missing features of the server.
    """
    try:
        if await engine.read(partial(_missing, functions=functions), single=True):
            await engine.write(partial(_create, functions=functions), fenced=False)
        if replaces:
            await engine.write(partial(_drop_others, functions=functions), alone=True, fenced=False)
    except ReplayBufError as error:
        if replaces and not (error.__cause__ is not None and says_unknown(error.__cause__)):
            raise
        _logger.info("functions that save round trips could not be created or replaced: %s", error)


def unusable(tx: Transaction, functions: Sequence[ServerFunction]) -> list[str]:
    """Return the names of functions that this role can't call, in a PostgreSQL database."""
    return [name for (name,) in tx.run(_UNUSABLE, _names(functions))]


def _missing(tx: Transaction, functions: Sequence[ServerFunction]) -> bool:
    return tx.dialect.is_remote and bool(tx.run(_CREATABLE, _names(functions)))


def _create(tx: Transaction, functions: Sequence[ServerFunction]) -> None:
    """Create missing functions; several processes may do so at once."""
    tx.dialect.lock_schema(tx)
    for function in functions:
        [(found,)] = tx.run("SELECT to_regproc($1) IS NOT NULL", function.name)
        if not found:
            tx.run(function.definition)


def _drop_others(tx: Transaction, functions: Sequence[ServerFunction]) -> None:
    for (old,) in tx.run(_OTHERS, PREFIX, _names(functions)):
        tx.run(f"DROP FUNCTION {old}")


def _names(functions: Sequence[ServerFunction]) -> list[str]:
    return [function.name for function in functions]


_CREATABLE = """
SELECT name FROM unnest($1::text[]) AS wanted (name), pg_language
WHERE to_regproc(name) IS NULL AND lanname = 'plpgsql' AND has_language_privilege(lanname, 'USAGE')
    AND has_schema_privilege(current_schema(), 'CREATE')
"""
_UNUSABLE = """
SELECT name FROM unnest($1::text[]) AS wanted (name) LEFT JOIN pg_proc ON oid = to_regproc(name)
WHERE oid IS NULL OR NOT has_function_privilege(oid, 'EXECUTE')
"""
_OTHERS = """
SELECT oid::regprocedure::text FROM pg_proc
WHERE starts_with(proname, $1) AND proname <> ALL ($2::text[]) AND pg_function_is_visible(oid)
    AND pg_has_role(proowner, 'USAGE')
"""
