"""Why those wait who do, and why somebody who would draw now would have to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from replaybuf.rollouts.status import Status
from replaybuf.rules.circumstances import Circumstances, Wait
from replaybuf.rules.diagnosis import Diagnosis, diagnose
from replaybuf.rules.limits import Limits
from replaybuf.storage.sql.inspection.buffers import DEFAULT, check_buffer, opened_buffers
from replaybuf.storage.sql.inspection.circumstances import (
    LIVE_SECONDS,
    Waiter,
    matching,
    read_circumstances,
    read_waiters,
)
from replaybuf.storage.sql.inspection.gave_up import Ended, last_given_up
from replaybuf.storage.sql.inspection.look import Look, time_of

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.transaction import Transaction


@dataclass(frozen=True, slots=True)
class Question:
    """A draw of which somebody asks why it would wait: from each task, unless it names one."""

    task: str | None = None
    size: int = 1
    status: Status = Status.COMPLETED
    query: str | None = None


@dataclass(frozen=True, slots=True)
class Explained:
    """A wait, the limits that hold for it (None if they aren't known), and why it isn't over."""

    wait: Wait
    limits: Limits | None
    diagnosis: Diagnosis

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the wait as plain values, with its times."""
        wait = self.wait
        return {
            "worker": wait.worker,
            "kind": wait.kind,
            "wants": dict(wait.wants),
            "status": str(wait.status),
            "query": wait.query,
            "since": time_of(wait.since),
            "deadline": time_of(wait.deadline),
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """The waits of a buffer, with why they aren't over, and the circumstances.

    `gave_up` is the wait that ended by its timeout last; None if somebody waits, or who gave up has gone on since.

    `asked` is true where nobody waits, or an answer to a question was wanted: these are draws that somebody might do.
    """

    buffer: str
    about: Circumstances
    asked: bool
    waits: list[Explained] = field(default_factory=list)
    gave_up: Ended | None = None


def explain(
    look: Look, buffer: str | None, question: Question, *, asked: bool, tx: Transaction | None = None
) -> list[Explanation]:
    """Explain the waits of one buffer or of all; of the question's task only, if it names one.

    Consumers come first, and of these who waits the longest. Where nobody waits, or with `asked` anywhere, the question
    is answered instead. How many groups match a query is looked up only with `tx`, the transaction of the look. Raises
    InputError when only other buffers exist.
    """
    check_buffer(look, buffer)
    names = opened_buffers(look) if buffer is None else [buffer]
    return [_explain(look, name, question, asked, tx) for name in names or [DEFAULT]]


def needs_transaction(look: Look) -> bool:
    """Return whether somebody waits for groups that match a query."""
    live = look.seconds() - LIVE_SECONDS
    return bool(look.value("SELECT count(*) FROM rb_waiter WHERE query IS NOT NULL AND seen_at > :live", live=live))


def _explain(look: Look, buffer: str, question: Question, asked: bool, tx: Transaction | None) -> Explanation:
    waiters = read_waiters(look, buffer)
    about = read_circumstances(look, buffer, [one.wait for one in waiters])
    chosen = [] if asked else [one for one in waiters if question.task is None or question.task in one.wait.wants]
    gave_up = None if chosen or asked else last_given_up(look, buffer, question.task)
    found = Explanation(buffer, about, asked=not chosen, gave_up=gave_up)
    for one in sorted(chosen, key=lambda one: one.wait.kind != "groups") or _answers(question, about, waiters):
        known = replace(about, limits=one.limits)
        if tx is not None:
            known = _matching(tx, buffer, one.wait, known)
        found.waits.append(Explained(one.wait, one.limits, diagnose(one.wait, known)))
    return found


def _matching(tx: Transaction, buffer: str, wait: Wait, about: Circumstances) -> Circumstances:
    from replaybuf.storage.sql.engine.transaction import Scope

    return matching(tx.of(Scope(buffer)), wait, about)


def _answers(question: Question, about: Circumstances, waiters: Sequence[Waiter]) -> list[Waiter]:
    """Return the draws that a question is about; the limits are those that a waiting process has, if one does."""
    limits = next((one.limits for one in waiters if one.limits is not None), None)
    tasks = [question.task] if question.task is not None else sorted({task for task, _, _ in about.tallies})
    draws = [
        Wait({task: question.size}, status=question.status, query=question.query) for task in tasks or ["any task"]
    ]
    return [Waiter(draw, limits) for draw in draws]
