"""Statements are compiled once a process, as in a run, and not again by each of the thousands of stores of tests."""

from __future__ import annotations

import weakref
from typing import Any

from sqlalchemy import Dialect, Engine
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlalchemy.util import LRUCache


class _SharedCache:
    """What SQLAlchemy keeps compiled statements in, for all engines. A key begins with the dialect of its engine."""

    def __init__(self) -> None:
        self._compiled: LRUCache[Any, Any] = LRUCache(3000)

    def get(self, key: tuple[Any, ...]) -> Any:
        return self._compiled.get((_kind(key[0]), *key[1:]))

    def __setitem__(self, key: tuple[Any, ...], compiled: Any) -> None:
        self._compiled[(_kind(key[0]), *key[1:])] = compiled


def share_compiled_statements() -> None:
    """Have the engines that are made from now on share what they compile."""
    cache, init = _SharedCache(), Engine.__init__

    def share(engine: Engine, *arguments: Any, **options: Any) -> None:
        init(engine, *arguments, **options)
        engine._compiled_cache = cache  # type: ignore[assignment]

    Engine.__init__ = share  # type: ignore[method-assign]
    for statement in (CreateTable, CreateIndex):
        _share_definitions(statement)


def _share_definitions(statement: type[Any]) -> None:
    compiled: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
    compiler = statement._compiler

    def compile_once(self: Any, dialect: Dialect, **options: Any) -> Any:
        key = (_kind(dialect), self.if_not_exists, *sorted(options.items()))
        known = compiled.setdefault(self.element, {})
        if key not in known:
            known[key] = compiler(self, dialect, **options)
        return known[key]

    statement._compiler = compile_once


def _kind(dialect: Dialect) -> Any:
    return type(dialect), dialect.server_version_info
