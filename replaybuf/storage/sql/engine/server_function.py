"""Write transactions that are one call of a function of PostgreSQL: one round trip, where statements need three.

Such a function takes the lock of all writers first. Each of its statements has a snapshot of its own at the level READ
COMMITTED, so what follows the lock sees all that was committed before. At other levels, which a role or a database may
have by default, it does nothing.

The answer to a call is also the answer to its commit. If it is lost, the mark tells whether there was a commit
(`engine.outage`), and the function has left its answer beside the mark. A call that is still unread when its connection
is lost must not be run later: its connection holds its own lock for as long as it lasts, not only in transactions, so
its server process is found and ended before the mark is read. Behind a pooler that can't be said.

A function's name has a hash of all that it does: other versions of replaybuf call others.
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

#: The parameters of a statement have the types to which it casts them.
_CAST = re.compile(r"CAST\(:(\w+) AS ([\w ]+(?:\(\d+\))?(?:\[\])?)\)")
_PARAMETER = re.compile(r"(?<!:):(\w+)")
#: Begins the names of all functions of all versions.
PREFIX = "rb_call_"
#: How much of its hash a name has.
_DIGITS = 8

_logger = logging.getLogger("replaybuf.database")


@dataclass(frozen=True)
class ServerFunction:
    """A statement, what to `lock` before it, and the `names` of its parameters in their order, those of `MARK` last.

    The statement writes the mark if it changes anything. It returns a row with its answer, an array of numbers, or none
    if it changed nothing. `lock` is a part of a function in PL/pgSQL.
    """

    what: str
    lock: str
    statement: str
    names: Sequence[str]

    @cached_property
    def name(self) -> str:
        """The name in the database."""
        digest = hashlib.sha256(self._definition("").encode()).hexdigest()
        return f"{PREFIX}{self.what}_{digest[:_DIGITS]}"

    @cached_property
    def call(self) -> Prepared:
        """The statement that calls it."""
        given = ", ".join(f":{name}" for name in self.names)
        return Prepared(lambda _: text(f"SELECT {self.name}({given})"), *self.names)

    @property
    def definition(self) -> str:
        """The statement that creates it."""
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
    """Create these functions where they are missing, as far as this role may; they save round trips.

    Without them everything works, so an error is only logged. With `replaces` those of other versions are dropped,
    which then do without; errors are raised, but for what a server lacks.
    """
    try:
        if await engine.read(partial(_missing, functions=functions), single=True):
            await engine.write(partial(_create, functions=functions), fenced=False)
        if replaces:
            await engine.write(partial(_drop_others, functions=functions), fenced=False)
    except ReplayBufError as error:
        if replaces and not (error.__cause__ is not None and says_unknown(error.__cause__)):
            raise
        _logger.info("functions that save round trips could not be created: %s", error)


def unusable(tx: Transaction, functions: Sequence[ServerFunction]) -> list[str]:
    """Return the names of those that this role can't call, of a database on a server."""
    return [name for (name,) in tx.run(_UNUSABLE, _names(functions))]


def _missing(tx: Transaction, functions: Sequence[ServerFunction]) -> bool:
    return tx.dialect.is_remote and bool(tx.run(_CREATABLE, _names(functions)))


def _create(tx: Transaction, functions: Sequence[ServerFunction]) -> None:
    """Create what is missing; several processes may do so at once."""
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
