"""Definitions of tables are compiled once a process, as in a run, and not again by each of the databases of tests."""

from __future__ import annotations

import weakref
from typing import Any

from sqlalchemy import Dialect
from sqlalchemy.schema import CreateIndex, CreateTable


def share_compiled_definitions() -> None:
    for statement in (CreateTable, CreateIndex):
        _share(statement)


def _share(statement: type[Any]) -> None:
    compiled: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
    compiler = statement._compiler

    def compile_once(self: Any, dialect: Dialect, **options: Any) -> Any:
        key = (type(dialect), dialect.server_version_info, self.if_not_exists, *sorted(options.items()))
        known = compiled.setdefault(self.element, {})
        if key not in known:
            known[key] = compiler(self, dialect, **options)
        return known[key]

    statement._compiler = compile_once
