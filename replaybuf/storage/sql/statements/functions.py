"""Looking for the functions of PostgreSQL that this version calls (`engine.server_function`), and creating them."""

from __future__ import annotations

from replaybuf.storage.sql.engine.server_function import PREFIX
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.put_at_once import FUNCTIONS


def missing(tx: Transaction) -> bool:
    """Return whether the database lacks one of these functions, and this role may create it."""
    return tx.dialect.is_remote and bool(tx.run(_CREATABLE, _NAMES))


def unusable(tx: Transaction) -> list[str]:
    """Return the names of those that this role can't call, of a database on a server."""
    return [name for (name,) in tx.run(_UNUSABLE, _NAMES)]


def create(tx: Transaction) -> None:
    """Create the functions that are missing; several processes may do so at once."""
    tx.dialect.lock_schema(tx)
    for function in FUNCTIONS:
        [(found,)] = tx.run("SELECT to_regproc($1) IS NOT NULL", function.name)
        if not found:
            tx.run(function.definition)


def replace(tx: Transaction) -> None:
    """Create the functions that are missing, and drop those of other versions, which then do without.

    Only as far as this role may do so.
    """
    if missing(tx):
        create(tx)
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
