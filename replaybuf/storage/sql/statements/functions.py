"""The functions of PostgreSQL that this version calls (`engine.server_function`): found, created, replaced."""

from __future__ import annotations

import logging

from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.errors import says_unknown
from replaybuf.storage.sql.engine.server_function import PREFIX
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.put_at_once import FUNCTIONS

_logger = logging.getLogger("replaybuf.database")


async def bring_up(engine: Database, *, replaces: bool = False) -> None:
    """Create the functions that are missing, as far as this role may; they save round trips.

    Without them everything works, so an error is only logged. With `replaces` those of other versions are dropped,
    which then do without; errors are raised, but for what a server lacks.
    """
    try:
        if await engine.read(_missing, single=True):
            await engine.write(_create, fenced=False)
        if replaces:
            await engine.write(_drop_others, fenced=False)
    except ReplayBufError as error:
        if replaces and not (error.__cause__ is not None and says_unknown(error.__cause__)):
            raise
        _logger.info("functions that save round trips could not be created: %s", error)


def unusable(tx: Transaction) -> list[str]:
    """Return the names of those that this role can't call, of a database on a server."""
    return [name for (name,) in tx.run(_UNUSABLE, _NAMES)]


def _missing(tx: Transaction) -> bool:
    return tx.dialect.is_remote and bool(tx.run(_CREATABLE, _NAMES))


def _create(tx: Transaction) -> None:
    """Create what is missing; several processes may do so at once."""
    tx.dialect.lock_schema(tx)
    for function in FUNCTIONS:
        [(found,)] = tx.run("SELECT to_regproc($1) IS NOT NULL", function.name)
        if not found:
            tx.run(function.definition)


def _drop_others(tx: Transaction) -> None:
    for (old,) in tx.run(_OTHERS, PREFIX, _NAMES):
        tx.run(f"DROP FUNCTION {old}")


_NAMES = [function.name for function in FUNCTIONS]
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
