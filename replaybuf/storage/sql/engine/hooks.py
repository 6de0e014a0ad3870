"""Hooks on a process's database traffic: each statement, and before and after each commit.

Tests and benchmarks install them (kill points, counts of statements, plans). The product itself installs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Hook:
    """Methods called in the thread that runs the statement; an exception of theirs aborts the transaction."""

    def statement(self, sql: str, values: Sequence[Any], many: bool) -> None:
        """Called before a statement is sent; `many`: once for each of the rows in `values`."""

    def committing(self) -> None:
        """Called before a commit."""

    def committed(self) -> None:
        """Called after a commit."""


#: The installed hooks. An empty list costs a statement next to nothing.
HOOKS: list[Hook] = []


@contextmanager
def installed(hook: Hook) -> Iterator[None]:
    """Install a hook in this block, for all databases of this process."""
    HOOKS.append(hook)
    try:
        yield
    finally:
        HOOKS.remove(hook)


def on_statement(sql: str, values: Sequence[Any] = (), *, many: bool = False) -> None:
    """Call the hooks before a statement."""
    for hook in HOOKS:
        hook.statement(sql, values, many)


def on_commit() -> None:
    """Call the hooks before a commit."""
    for hook in HOOKS:
        hook.committing()


def after_commit() -> None:
    """Call the hooks after a commit."""
    for hook in HOOKS:
        hook.committed()
