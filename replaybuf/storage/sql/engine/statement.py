"""Statements: SQL that is written once for both databases, and compiled once for each.

Most are texts with parameters `:name` and a few macros in braces, for which each database has its own SQL
(`Dialect.macros`):

    {in:uids}, {not_in:uids}  follow a column: it is, or isn't, one of the numbers of the list `uids`
    {in_texts:tasks}, {not_in_texts:tasks}  the same for texts
    {json:tags}               the value `tags` as JSON
    {moment:at}               the moment `at` of the present, NULL for None: on a server its own time, as clocks differ
    {clock:now}               the time `now` of the lease clock, by which leases end: on a server its own time
    {lock}, {lock:g}, {skip}  at the end of a query: locks its rows; those of the table `g`; those not locked by others
    {now}                     the time in seconds since the epoch
    {connections}             the number of connections to the database, by the server's count
    {shard}                   the shard of `rb_tally` that the transaction updates

Statements that vary with a user's query or with the policy are SQLAlchemy Core, which its public methods compile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.dialect import Dialect

Convert = Callable[[Any], Any]


class Statement:
    """A statement, compiled once for each dialect: a text, or a function that returns a statement of SQLAlchemy."""

    __slots__ = ("_forms", "_source")

    def __init__(self, source: str | Callable[[Dialect], Any]) -> None:
        self._source = source
        self._forms: dict[Dialect, Form] = {}

    def form(self, dialect: Dialect) -> Form:
        """Return the statement compiled for a dialect."""
        form = self._forms.get(dialect)
        if form is None:
            source = self._source
            form = of_text(source, dialect) if isinstance(source, str) else of_core(source(dialect), dialect)
            self._forms[dialect] = form
        return form


@dataclass(frozen=True, slots=True)
class Form:
    """A compiled statement: the driver's SQL, and the names of its parameters in the driver's order.

    `fixed` has the values of parameters that aren't given, and `converts` the converters of those that have one.
    """

    sql: str
    names: Sequence[str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    converts: Mapping[str, Convert] = field(default_factory=dict)

    def values(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the driver's parameters for these values; there may be more than the statement has. Raises KeyError"""
        if self.fixed:
            given = {**self.fixed, **given}
        if not self.converts:
            return tuple([given[name] for name in self.names])
        converts = self.converts
        return tuple([converts[name](given[name]) if name in converts else given[name] for name in self.names])


def form_of(statement: Any, dialect: Dialect) -> Form:
    """Return a text, a Statement, or a statement of SQLAlchemy compiled for a dialect; the last each time."""
    if isinstance(statement, str):
        return _of_text(statement).form(dialect)
    return statement.form(dialect) if isinstance(statement, Statement) else of_core(statement, dialect)


@lru_cache(maxsize=1024)
def _of_text(text: str) -> Statement:
    return Statement(text)


_PART = re.compile(r"\{(?P<macro>\w+)(?::(?P<argument>\w+))?\}|(?<![:\w]):(?P<name>[a-z_]\w*)")


def of_text(text: str, dialect: Dialect) -> Form:
    """Return a text with macros compiled for a dialect."""
    names: list[str] = []
    converts: dict[str, Convert] = {}

    def parameter(name: str) -> str:
        if name not in names:
            names.append(name)
        return f"{dialect.parameter}{names.index(name) + 1}"

    def replaced(found: re.Match[str]) -> str:
        macro, argument = found["macro"], found["argument"]
        if macro is None:
            return parameter(found["name"])
        if argument is None:
            return dialect.macros[macro]
        if macro in ("lock", "skip"):
            return dialect.macros[f"{macro}_of"].format(argument)
        if macro == "json":
            converts[argument] = to_json_text
        elif "in" in macro.split("_"):
            converts[argument] = dialect.listed
        return dialect.macros[macro].format(parameter(argument))

    return Form(_PART.sub(replaced, text), names, converts=converts)


def to_json_text(value: Any) -> str | None:
    """Return a value as JSON, None as NULL."""
    return None if value is None else to_json(value).decode()


def of_core(statement: Any, dialect: Dialect) -> Form:
    """Return a statement of SQLAlchemy compiled for a dialect.

    Its parameters without a value are given later, in the driver's form.
    """
    compiled = statement.compile(dialect=dialect.compiler)
    if compiled.post_compile_params:  # lists: then all of its values must be in the statement
        compiled = statement.compile(dialect=dialect.compiler, compile_kwargs={"render_postcompile": True})
    required = {name for parameter, name in compiled.bind_names.items() if parameter.required}
    kinds = {name: parameter.type for parameter, name in compiled.bind_names.items()}
    fixed = {}
    for name, value in compiled.construct_params(dict.fromkeys(required)).items():
        if name not in required:
            kind = kinds.get(name)
            convert = kind and kind.dialect_impl(dialect.compiler).bind_processor(dialect.compiler)
            fixed[name] = convert(value) if convert else value
    return Form(str(compiled), compiled.positiontup or (), fixed)
