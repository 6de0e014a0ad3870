"""Hooks into what a process sends to its databases: each statement, and both sides of each commit.

Tests and benchmarks install them (kill points, counts of statements, plans). The product itself installs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Hook:
    """Methods that are called in whichever thread runs the statement; what they raise ends the transaction."""

    def statement(self, sql: str, values: Sequence[Any], many: bool) -> None:
        """A statement is about to be sent; `many`: once for each of the rows in `values`."""

    def committing(self) -> None:
        """A transaction is about to be committed."""

    def committed(self) -> None:
        """A transaction was committed."""


#: Those that are installed. An empty list costs a statement next to nothing.
HOOKS: list[Hook] = []


@contextmanager
def installed(hook: Hook) -> Iterator[None]:
    """Have a hook called in this block, for all databases of this process."""
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
