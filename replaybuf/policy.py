"""Replay policies: in what order groups are drawn.

A policy is data: a name and an ORDER BY. Backends compile the order (`storage.sql.statements`) or sort by it
(`storage.memory`), so that a new policy is a subclass of a few lines that works on all of them:

    class BestFirst(ReplayPolicy):
        name = "best_first"
        order = (OrderTerm("reward", descending=True), OrderTerm("timestamp_id"))
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, TypeVar

from replaybuf.errors import ConfigError, QueryError
from replaybuf.query import FIELDS


@dataclass(frozen=True, slots=True)
class OrderTerm:
    """One term of an ORDER BY: a field of the query language (not a tag). Groups without a value come last."""

    field: str
    descending: bool = False


Order = tuple[OrderTerm, ...]

T = TypeVar("T")


def check_field(name: str, place: str) -> None:
    """Raise QueryError unless `name` is a field that groups can be ordered by."""
    if not isinstance(name, str) or name not in FIELDS:
        near = difflib.get_close_matches(str(name), FIELDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise QueryError(f"can't order by {name!r}{hint} (fields: {', '.join(FIELDS)})", place)


class ReplayPolicy:
    """What order groups are drawn in. Subclasses set `name` and `order`; the order should end in `timestamp_id`."""

    name: ClassVar[str]
    order: ClassVar[Order]

    def __init_subclass__(cls) -> None:
        for term in getattr(cls, "order", ()):
            check_field(term.field, f"{cls.__name__}.order")


class FIFOPolicy(ReplayPolicy):
    """Oldest first: for synchronous training, where data is consumed in the order in which it was made."""

    name = "fifo"
    order = (OrderTerm("timestamp_id"),)


class StalenessPolicy(ReplayPolicy):
    """Most stale first, then oldest: old data is used before it expires."""

    name = "staleness"
    order = (OrderTerm("staleness", descending=True), OrderTerm("timestamp_id"))


POLICIES: dict[str, type[ReplayPolicy]] = {policy.name: policy for policy in (FIFOPolicy, StalenessPolicy)}


def resolve_policy(policy: str | ReplayPolicy | type[ReplayPolicy]) -> ReplayPolicy:
    """A policy from its name, class, instance, or "module:Class". Raises ConfigError for what isn't one."""
    found = _import_policy(policy) if isinstance(policy, str) else policy
    if isinstance(found, type) and issubclass(found, ReplayPolicy):
        found = found()
    if not isinstance(found, ReplayPolicy):
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"unknown policy {policy!r}; there are {known}, or your own as 'module:Class'")
    for attribute in ("name", "order"):
        if not getattr(found, attribute, None):
            raise ConfigError(f"the policy {type(found).__name__} has no {attribute}")
    return found


def _import_policy(name: str) -> object:
    if name in POLICIES or ":" not in name:
        return POLICIES.get(name)
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute, None)
    except ImportError as error:
        raise ConfigError(f"the policy {name!r} can't be imported: {error}") from error


def parse_order(order_by: str | OrderTerm | Iterable[str | OrderTerm] | None) -> Order:
    """An ORDER BY as people write it: a field name or several, each with a leading "-" for descending.

    Ties, and None, mean insertion order. Raises QueryError for fields that don't exist.
    """
    if order_by is None:
        terms: list[OrderTerm] = []
    elif isinstance(order_by, (str, OrderTerm)):
        terms = [_parse_term(order_by)]
    elif isinstance(order_by, Iterable):
        terms = [_parse_term(term) for term in order_by]
    else:
        raise QueryError(f"expected a field name or a list of them, got {type(order_by).__name__}", "order_by")
    return (*terms, OrderTerm("timestamp_id"))


def _parse_term(term: str | OrderTerm) -> OrderTerm:
    if isinstance(term, str):
        term = OrderTerm(term.removeprefix("-"), descending=term.startswith("-"))
    if not isinstance(term, OrderTerm):
        raise QueryError(f"expected a field name, got {type(term).__name__}", "order_by")
    check_field(term.field, "order_by")
    return term


def in_order(items: Iterable[T], order: Order, value: Callable[[T, str], Any] = getattr) -> list[T]:
    """Sort by several terms, groups without a value last: stable sorts from the last term to the first."""
    result = list(items)
    for term in reversed(order):
        known = [item for item in result if value(item, term.field) is not None]
        unknown = [item for item in result if value(item, term.field) is None]
        known.sort(key=lambda item: value(item, term.field), reverse=term.descending)
        result = known + unknown
    return result
