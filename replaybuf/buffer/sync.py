"""The synchronous API of a buffer: the same calls without `await`, for trainers and workers without an event loop.

    from replaybuf import ReplayBufferConfig

    with ReplayBufferConfig(url="sqlite:///run.db").build_sync() as buffer:
        buffer.put(group, "math")
        batch, counts = buffer.take_batch({"math": 64}, timeout=600)

`docs/calling.md` says when to use it.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

from replaybuf.buffer.background import end, run
from replaybuf.buffer.lease import Cursors, Lease, Leasing
from replaybuf.buffer.replay_buffer import ReplayBuffer
from replaybuf.common.checks import refused
from replaybuf.errors import InputError
from replaybuf.rules.limits import Limits
from replaybuf.rules.policies import ReplayPolicy
from replaybuf.storage.values import Leased, R, StorageItem
from replaybuf.values.rollouts.rollout_type import RolloutType

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
F = TypeVar("F")

if TYPE_CHECKING:

    class _Method(Generic[P, T]):
        """A method, as type checkers see it."""

        @overload
        def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, P], T]: ...
        @overload
        def __get__(self, instance: object, owner: type) -> Callable[P, T]: ...
        def __get__(self, instance: Any, owner: type) -> Any: ...


# Words of asynchronous docstrings, and their replacements in synchronous ones.
_WORDS = {
    "`await` instead of": "`.begin()` instead of",
    "async with": "with",
    "await ": "",
    "cancellation": "KeyboardInterrupt",
    "a Lease to be": "a SyncLease to be",
}


def mirrored(
    method: Callable[Concatenate[Any, P], S], turn: Callable[[S], T], *, returns: str | None = None
) -> _Method[P, T]:
    """Return a synchronous method that calls `method` of `self.asynchronous` and converts the result by `turn`.

    `turn` is `run` for coroutines. `returns` is the annotation of the result where it differs.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> T:
        return turn(getattr(self.asynchronous, name)(*args, **kwargs))

    if returns is not None:
        call.__signature__ = inspect.signature(method).replace(return_annotation=returns)  # type: ignore[attr-defined]
    for word, replacement in _WORDS.items():
        call.__doc__ = (call.__doc__ or "").replace(word, replacement)
    return cast("_Method[P, T]", call)


def face_of(kind: type) -> Callable[[type[F]], type[F]]:
    """Complete a synchronous class: names that it only annotates become properties that read `self.asynchronous`.

    Raises TypeError if it lacks a public name of the asynchronous class `kind`: type checkers need a line for each.
    """

    def complete(face: type[F]) -> type[F]:
        for name in inspect.get_annotations(face):
            doc = getattr(getattr(kind, name, None), "__doc__", None)
            setattr(face, name, property(operator.attrgetter(f"asynchronous.{name}"), doc=doc))
        if missing := {name for name in dir(kind) if not name.startswith("_")} - {*dir(face)}:
            raise TypeError(f"{face.__name__} lacks {', '.join(sorted(missing))} of {kind.__name__}")
        return face

    return complete


def as_it_is(result: T) -> T:
    """Return the result of a method that is synchronous itself."""
    return result


_END: Any = object()


def items_of(items: AsyncIterator[T]) -> Generator[T]:
    """Yield the groups that `find` yields: read from the store while they are iterated over, never all at once.

    The iteration may be abandoned at any time; `close`, or garbage collection, ends the read.
    """

    async def following() -> T:
        return await anext(items, _END)

    while (item := run(following())) is not _END:
        yield item


@face_of(Lease)
class SyncLease(Generic[R]):
    """A `Lease` without `await`: `batch` has the groups by task, `items` has them with their metadata.

    `counts` has their number by task; `token` is the fencing token: a later lease has a higher one. The database's
    thread renews the lease, each time by `seconds`, while this process lives, however long the caller works on groups.
    """

    seconds: float
    token: int
    until: float
    handle: Leased
    items: dict[str, list[StorageItem[R]]]
    batch: dict[str, list[list[R]]]
    counts: dict[str, int]
    open: frozenset[int]
    lost: bool

    def __init__(self, lease: Lease[R]) -> None:
        self.asynchronous = lease

    def __repr__(self) -> str:
        return f"<SyncLease {self.token}: {len(self.open)} groups open>"

    def _repr_html_(self) -> str:
        return self.asynchronous._repr_html_()

    acknowledge = mirrored(Lease[R].acknowledge, run)
    finish = mirrored(Lease[R].finish, run)
    save = mirrored(Lease[R].save, run)
    add = mirrored(Lease[R].add, run)
    stored = mirrored(Lease[R].stored, run)
    give_back = mirrored(Lease[R].give_back, run)
    give_back_after = mirrored(Lease[R].give_back_after, run)
    extend = mirrored(Lease[R].extend, run)
    beat = mirrored(Lease[R].beat, run)
    stop = mirrored(Lease[R].stop, as_it_is)


def _run_to_lease(claiming: Coroutine[Any, Any, Lease | None]) -> SyncLease[Any] | None:
    lease = run(claiming)
    return None if lease is None else SyncLease(lease)


@face_of(Cursors)
class SyncCursors:
    """The `Cursors` of a buffer without `await`."""

    def __init__(self, cursors: Cursors) -> None:
        self.asynchronous = cursors

    read = mirrored(Cursors.read, run)
    prompts = mirrored(Cursors.prompts, run)
    move = mirrored(Cursors.move, run)
    put = mirrored(Cursors.put, run)
    claim = mirrored(Cursors.claim, _run_to_lease, returns="SyncLease | None")


class SyncLeasing(Generic[R]):
    """The result of `lease_batch`: use it with `with`, or `begin()` a lease to be settled by hand."""

    def __init__(self, leasing: Leasing[R]) -> None:
        self.asynchronous = leasing

    if not TYPE_CHECKING:
        __aenter__ = __aexit__ = refused("a lease of a synchronous buffer is entered by `with`, not by `async with`")

    def begin(self) -> SyncLease[R]:
        """Draw the groups and return their lease, which the caller settles."""

        async def begin() -> Lease[R]:
            return await self.asynchronous

        return SyncLease(run(begin()))

    def __enter__(self) -> SyncLease[R]:
        return SyncLease(run(self.asynchronous.__aenter__()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        begun = False

        async def leave(error: BaseException | None) -> None:
            nonlocal begun
            begun = True
            await self.asynchronous.__aexit__(None if error is None else type(error), error, None)

        # Acknowledges, or raises; or gives the groups back: if that fails, they come back when the lease ends.
        wait_for = run if kind is None else end
        try:
            wait_for(leave(error))
        except BaseException as interrupt:
            if not begun and not isinstance(interrupt, Exception):
                end(leave(interrupt))
            raise


@face_of(ReplayBuffer)
class SyncReplayBuffer(Generic[R]):
    """A `ReplayBuffer` whose calls block until they are done. Built by `ReplayBufferConfig(...).build_sync()`.

    The calls, their arguments, results and errors are those of `ReplayBuffer`. They may be made by any number of
    threads, by forked processes, and inside a running event loop, which they block meanwhile. Ctrl-C cancels a blocked
    call: either the caller has the groups or the store has them.

    `rollout_type` describes the class of the rollouts. `asynchronous` is the same buffer for coroutines, which
    `replaybuf.buffer.sync.run` runs.
    """

    policy: ReplayPolicy
    limits: Limits
    durable: bool
    worker: str
    rollout_type: RolloutType

    def __init__(self, buffer: ReplayBuffer[R]) -> None:
        self.asynchronous = buffer
        self.cursors = SyncCursors(buffer.cursors)

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
        raise InputError(reason="not picklable")

    def __repr__(self) -> str:
        return f"Sync{self.asynchronous!r}"

    def _repr_html_(self) -> str:
        return self.asynchronous._repr_html_()

    def __len__(self) -> int:
        return len(self.asynchronous)

    def __bool__(self) -> bool:
        """Return True, also for an empty buffer: `if buffer:` tests whether there is one."""
        return True

    close = mirrored(ReplayBuffer[R].close, end)

    put = mirrored(ReplayBuffer[R].put, run)
    put_many = mirrored(ReplayBuffer[R].put_many, run)
    get = mirrored(ReplayBuffer[R].get, run)
    take_batch = mirrored(ReplayBuffer[R].take_batch, run)
    sample = mirrored(ReplayBuffer[R].sample, run)
    lease_batch = mirrored(ReplayBuffer[R].lease_batch, SyncLeasing[R], returns="SyncLeasing[R]")
    adopt = mirrored(ReplayBuffer[R].adopt, SyncLease[R], returns="SyncLease[R]")
    is_ready = mirrored(ReplayBuffer[R].is_ready, run)
    wait_ready = mirrored(ReplayBuffer[R].wait_ready, run)
    why = mirrored(ReplayBuffer[R].why, run)

    delete = mirrored(ReplayBuffer[R].delete, run)
    update = mirrored(ReplayBuffer[R].update, run)
    update_priorities = mirrored(ReplayBuffer[R].update_priorities, run)
    annotate = mirrored(ReplayBuffer[R].annotate, run)
    refresh_staleness = mirrored(ReplayBuffer[R].refresh_staleness, run)

    find = mirrored(ReplayBuffer[R].find, items_of, returns="Generator[StorageItem[R]]")
    count = mirrored(ReplayBuffer[R].count, run)
    count_statuses = mirrored(ReplayBuffer[R].count_statuses, run)
    filling = mirrored(ReplayBuffer[R].filling, run)
    count_where = mirrored(ReplayBuffer[R].count_where, run)
    tallies = mirrored(ReplayBuffer[R].tallies, run)
    dropped = mirrored(ReplayBuffer[R].dropped, run)
    metrics = mirrored(ReplayBuffer[R].metrics, run)

    import_from = mirrored(ReplayBuffer[R].import_from, run)
    export = mirrored(ReplayBuffer[R].export, run)

    check_fence = mirrored(ReplayBuffer[R].check_fence, run)
    checkpoint = mirrored(ReplayBuffer[R].checkpoint, run)
    restore = mirrored(ReplayBuffer[R].restore, run)
    checkpoints = mirrored(ReplayBuffer[R].checkpoints, run)
    drop_checkpoint = mirrored(ReplayBuffer[R].drop_checkpoint, run)

    save = mirrored(ReplayBuffer[R].save, run)
    resume = mirrored(ReplayBuffer[R].resume, run)


def asynchronous_of(buffer: ReplayBuffer[R] | SyncReplayBuffer[R]) -> ReplayBuffer[R]:
    """Return the buffer whose calls are coroutines."""
    return buffer.asynchronous if isinstance(buffer, SyncReplayBuffer) else buffer


__all__ = ["SyncCursors", "SyncLease", "SyncLeasing", "SyncReplayBuffer", "asynchronous_of", "end", "run"]
