"""Statuses of groups and rollouts, which of them take no room, and their equivalents in users' classes.

These are members of an Enum, or strings in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import Enum, StrEnum
from typing import Any, Final, TypeAlias

from replaybuf.common.checks import shown
from replaybuf.errors import ConfigError, InputError


class Status(StrEnum):
    """The state of a rollout, or of a group."""

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"
    FILLING = "filling"


#: Groups that are neither trained on nor finished.
UNFIT = (Status.FILTERED, Status.FAILED)
#: Groups outside the capacity that are never evicted: kept for SQL, with retention limits of their own; and finished
#: rollouts of groups that fill.
ASIDE = (Status.ARCHIVED, *UNFIT, Status.FILLING)


# A group that isn't fully completed has the first of these statuses that any of its rollouts has.
_STATUS_PRECEDENCE = (
    Status.FAILED,
    Status.ABORTED,
    Status.EXPIRED,
    Status.FILTERED,
    Status.INIT,
    Status.ARCHIVED,
    Status.FILLING,
)


def group_status(statuses: Iterable[Status]) -> Status:
    """Return a group's status from its rollouts' statuses.

    COMPLETED when all are, otherwise the first of FAILED, ABORTED, EXPIRED, FILTERED, INIT, ARCHIVED, FILLING that any
    has.
    """
    present = set(statuses)
    return next((status for status in _STATUS_PRECEDENCE if status in present), Status.COMPLETED)


#: A status as an argument: a Status, a member of another Enum, or a string.
StatusLike: TypeAlias = str | Enum

#: Other names of our statuses: slime's.
_ALIASES: Final = {"pending": Status.INIT, "truncated": Status.COMPLETED}

#: Substitutes for statuses that a user's class lacks, which let the prompt be generated again.
_SUBSTITUTES: Final = {Status.EXPIRED: (Status.ABORTED, Status.INIT)}


class Statuses:
    """Converts users' statuses to ours. `own` maps their values, names or members to our statuses.

    Raises ConfigError for a mapping to something else.
    """

    def __init__(self, own: Mapping[Any, Any] | None = None) -> None:
        table = {**_ALIASES, **{status.value: status for status in Status}}
        mapped: dict[Any, Status] = {}
        for value, target in (own or {}).items():
            status = _status_by_text(target, table)
            if status is None:
                raise ConfigError(f"statuses: {shown(value)} is mapped to {shown(target)}; {_statuses_text()}")
            mapped[_lower_text(value)] = status
        self._table: dict[Any, Status] = {**table, **mapped}
        self._own_texts = {status: text for text, status in reversed(mapped.items()) if isinstance(text, str)}

    def get(self, value: Any) -> Status | None:
        """Return the Status of a Status, a string, or a member of any Enum; None if unknown."""
        if type(value) is Status:
            return value
        return _status_by_text(value, self._table)

    def check(self, value: Any) -> Status:
        """Return the Status of a value, as `get` does. Raises InputError."""
        status = self.get(value)
        if status is None:
            hint = f"{self._suggestion(value)}{_statuses_text()}, and those of the config's statuses="
            raise InputError(f"unknown status {shown(value)}; {hint}")
        return status

    def _suggestion(self, value: Any) -> str:
        """Return a question about the status that was probably meant; "" if none is near."""
        text = value.name if isinstance(value, Enum) else value
        names = [name for name in self._table if isinstance(name, str) and name != Status.FILLING]
        similar = get_close_matches(_lower_text(text[:50]), names, n=1) if isinstance(text, str) else []
        return f"did you mean {similar[0]}? " if similar else ""

    def like(self, status: Status, now: Any, choices: Iterable[Any]) -> Any:
        """Return the equivalent of `status` for a rollout whose status is `now`.

        It is a member of the same Enum, one of the `choices` declared by the class, or a string in the same case.
        Without an equivalent, it is one from which the prompt is generated again, if `status` is EXPIRED, or else
        `now`.
        """
        if now is status and self.get(now) is status:
            return now
        if isinstance(now, Enum):
            choices = list(type(now))
        elif type(now) is str:
            choices = [choice for choice in choices if type(choice) is str]
            if not choices:
                return _in_case_of(now, self._own_texts.get(status, status.value))
        if not choices:
            return status
        for target in (status, *_SUBSTITUTES.get(status, ())):
            fitting = [choice for choice in choices if self.get(choice) is target]
            # An alias, such as "truncated", is more specific than the status.
            exact = [choice for choice in fitting if _status_by_text(choice, _OUR_TEXTS) is target]
            if fitting:
                return (exact or fitting)[0]
        return now


#: The conversion of statuses without a config.
OUR_STATUSES: Final = Statuses()

_OUR_TEXTS: Final = {status.value: status for status in Status}


def _status_by_text(value: Any, table: Mapping[Any, Status]) -> Status | None:
    """Return the status of a value in this table: by itself, then by the value and the name of an Enum member."""
    candidates = [value]
    if isinstance(value, Enum):
        candidates += [value.value, value.name]
    for candidate in candidates:
        try:
            status = table.get(_lower_text(candidate))
        except TypeError:  # not hashable
            continue
        if status is not None:
            return status
    return None


def _lower_text(value: Any) -> Any:
    return str.__str__(value).lower() if isinstance(value, str) else value


def _in_case_of(now: str, text: str) -> str:
    if now.isupper():
        return text.upper()
    return text.capitalize() if now.istitle() else text


def _statuses_text() -> str:
    return f"there are {', '.join(Status)}"
