"""Fragments on their way into chunks: each has to follow the one before it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from replaybuf.chunks.fragments import Fragment, ModelState, Problem, Session, fragment_error
from replaybuf.chunks.ledger import Ledger
from replaybuf.errors import ConflictError

_ATTEMPTS = 1000
# The number of workers whose progress is remembered between puts; that of others is read.
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class _Known:
    """A worker's progress as last seen here, and the groups that it was read from; valid while these are all there."""

    label: Session
    session: int
    next: int
    end: int
    state: tuple[int, ...]
    worker: tuple[int, ...]


class Joining:
    """Stores fragments where they belong, and makes the chunks that they complete.

    A fragment that doesn't follow raises FragmentError; with `drops` it is counted instead. With `begins` the first
    fragment of a session begins it.
    """

    def __init__(self, ledger: Ledger, *, drops: bool, begins: bool) -> None:
        self._ledger = ledger
        self._drops = drops
        self._begins = begins
        self._known: dict[str, _Known] = {}

    async def put(self, fragment: Fragment) -> bool:
        """Store a fragment; return False if it was dropped. See `ChunkBuffer.put`."""
        worker, index, label = fragment.worker, fragment.index, fragment.session
        known = self._known.get(worker)
        if known is None or (known.label, known.next) != (label, index) or not await self._still(worker, known):
            self._known.pop(worker, None)
            found = await self._find_place(fragment)
            if found is None:
                return False
            known = found
        last = index + 1 == known.end
        uid = await self._ledger.store(fragment.numbered(known.session), last=last)
        if last:
            await self._settle(worker, known)
        else:
            self._remember(worker, replace(known, next=index + 1, worker=(*known.worker, uid)))
        return True

    def forget(self, worker: str) -> None:
        """Forget the cached progress of a worker, because its fragments are removed."""
        self._known.pop(worker, None)

    async def _still(self, worker: str, known: _Known) -> bool:
        there = await self._ledger.all_there((*known.state, *known.worker))
        return there and not await self._ledger.goes_on(worker, known.session, known.next)

    async def _find_place(self, fragment: Fragment) -> _Known | None:
        """Return the place of the fragment, after the steps that come before it; None if it is to be dropped."""
        worker, index, label = fragment.worker, fragment.index, fragment.session
        for _ in range(_ATTEMPTS):
            state = await self._state_for(fragment)
            if label != state.label:
                await self._refuse(fragment, "session", state.label, over=state.is_over(label))
                return None
            session = state.session
            progress = await self._ledger.settle(worker, session)
            if progress is not None and index == progress.next:
                return _Known(label, session, index, progress.start + progress.size, state.uids, progress.uids)
            if progress is not None and index < progress.next:
                await self._refuse(fragment, "duplicate", progress.next)
                return None
            if progress is not None and not self._drops:
                raise fragment_error(fragment, "gap", progress.next)
            # Another process may begin this worker at the same time: the next read shows it.
            begun = await self._ledger.begin(worker, session, index, progress)
            if begun and progress is not None:
                await self._ledger.drop("gap")
        raise ConflictError(f"the fragments of worker {worker!r} change all the time; nothing was stored")

    async def _refuse(self, fragment: Fragment, kind: Problem, expected: Session, *, over: bool = True) -> None:
        if not self._drops:
            raise fragment_error(fragment, kind, expected, over=over)
        await self._ledger.drop(kind)

    async def _settle(self, worker: str, known: _Known) -> None:
        progress = await self._ledger.settle(worker, known.session)
        if progress is None:  # the session is over
            self._known.pop(worker, None)
            return
        end = progress.start + progress.size
        self._remember(worker, replace(known, next=progress.next, end=end, worker=progress.uids))

    def _remember(self, worker: str, known: _Known) -> None:
        if len(self._known) >= _REMEMBERED and worker not in self._known:
            self._known.clear()
        self._known[worker] = known

    async def _state_for(self, fragment: Fragment) -> ModelState:
        """Return the model's state; the fragment's, if it begins its session."""
        state, label = await self._ledger.state(), fragment.session
        if state is None or (self._begins and label != state.label and not state.is_over(label)):
            state = await self._ledger.move(label, fragment.version)
        if self._ledger.cleared is None or self._ledger.cleared < state.session:
            # The process that began the session may have died before this; nothing of the session is stored before.
            await self._ledger.clear(state)
        return state
