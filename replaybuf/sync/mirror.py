"""Synchronous methods made from asynchronous ones: name, signature, types and docstring are theirs."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

from replaybuf.checks import refused
from replaybuf.errors import NotPicklableError
from replaybuf.sync.loop import end, run

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

if TYPE_CHECKING:

    class _Method(Generic[P, T]):
        """A method, as type checkers see it."""

        @overload
        def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, P], T]: ...
        @overload
        def __get__(self, instance: object, owner: type) -> Callable[P, T]: ...
        def __get__(self, instance: Any, owner: type) -> Any: ...


def mirrored(
    method: Callable[Concatenate[Any, P], S],
    turn: Callable[[S], T],
    *,
    returns: str | None = None,
    doc: str | None = None,
) -> _Method[P, T]:
    """Return a method that calls this one of `self.asynchronous`, and turns its result into that of a synchronous one.

    `turn` is `run` for coroutines. `returns` is the annotation of the result, and `doc` the docstring, where they
    differ.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> T:
        return turn(getattr(self.asynchronous, name)(*args, **kwargs))

    if returns is not None:
        call.__signature__ = inspect.signature(method).replace(return_annotation=returns)  # type: ignore[attr-defined]
    call.__doc__ = doc or (method.__doc__ or "").replace("`await ", "`")
    return cast("_Method[P, T]", call)


def shared(name: str, doc: str) -> Any:
    """Return a property with the value that `self.asynchronous` has under this name."""
    return property(operator.attrgetter(f"asynchronous.{name}"), doc=doc)


def as_it_is(result: T) -> T:
    """Return the result of a method that is synchronous already."""
    return result


class Opened(Protocol):
    """A buffer that is opened by `async with`."""

    def __len__(self) -> int: ...
    def __aenter__(self) -> Coroutine[Any, Any, object]: ...
    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, None]: ...


B = TypeVar("B", bound=Opened)


class SyncBuffer(Generic[B]):
    """What all synchronous buffers share: opening by `with`, and looking like the buffer that they are a face of."""

    def __init__(self, buffer: B) -> None:
        self.asynchronous = buffer

    def __enter__(self) -> Self:
        run(self.asynchronous.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end(self.asynchronous.__aexit__(kind, error, trace))

    if not TYPE_CHECKING:
        __aenter__ = __aexit__ = refused(
            "the calls of this buffer block: open it by `with`; for `async with`, make one by build() of the config"
        )

    def __reduce__(self) -> str:
        raise NotPicklableError

    def __repr__(self) -> str:
        return f"Sync{self.asynchronous!r}"

    def _repr_html_(self) -> str | None:
        shown = getattr(self.asynchronous, "_repr_html_", None)
        return None if shown is None else shown()

    def __len__(self) -> int:
        return len(self.asynchronous)

    def __bool__(self) -> bool:
        """Return True, also for an empty buffer: `if buffer:` tests whether there is one."""
        return True
