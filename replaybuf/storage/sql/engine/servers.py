"""Selects the server of a cluster to follow, from the roles and timelines of the servers that a URL names.

A promoted standby begins a new timeline of its cluster. A process that has written to a timeline never returns to a
lower one: that is an old primary, without the transactions since the failover. No I/O happens here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from replaybuf.errors import AccessError, UnreachableError
from replaybuf.storage.sql.engine.urls import Host


class Standing(NamedTuple):
    """A server's role and timeline; None for values that it doesn't report.

    `system` is the id of its cluster, the same for all its servers. A standby has no timeline here.
    """

    system: str | None = None
    timeline: int | None = None
    is_standby: bool = False
    started: datetime | None = None
    process: int | None = None

    @property
    def instance(self) -> tuple[str | None, datetime | None]:
        """An id of the server process: equal for connections by different addresses, until the server's next start."""
        return self.system, self.started

    def is_of_another(self, other: Standing) -> bool:
        """Return whether this server is of another cluster."""
        return None not in (self.system, other.system) and self.system != other.system

    def is_left(self, followed: Standing) -> bool:
        """Return whether this is an old primary, superseded by the followed server; it gets no more writes."""
        later = self.timeline is not None and followed.timeline is not None and self.timeline < followed.timeline
        return later and not self.is_of_another(followed)


#: For a server that wasn't queried.
UNKNOWN = Standing()

_ASK = """
SELECT {system}, CASE WHEN pg_is_in_recovery() THEN NULL
       ELSE CAST(CAST('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) AS bit(32)) AS bigint) END,
    pg_is_in_recovery(), pg_postmaster_start_time(), pg_backend_pid()
"""
#: Query of a server's `Standing`.
ASK = _ASK.format(system="(SELECT CAST(system_identifier AS text) FROM pg_control_system())")
#: The same without the cluster's id, which needs a privilege.
ASK_LESS = _ASK.format(system="CAST(NULL AS text)")


@dataclass(frozen=True, slots=True)
class AskedServer:
    """A server that was queried: its standing, or the `problem` that prevented the query."""

    host: Host | None
    standing: Standing = UNKNOWN
    problem: str = ""

    def __str__(self) -> str:
        return "the server" if self.host is None else str(self.host)


def choose(found: Sequence[AskedServer], followed: Standing | None, where: str, *, writes: bool) -> AskedServer:
    """Return the server to use, out of the queried ones in the order of the URL: the primary of the highest timeline.

    Readers take a standby where there is no primary. Raises UnreachableError, AccessError.
    """
    reasons = {one: one.problem or (_why_not(one.standing, followed) if writes else "") for one in found}
    fit = [one for one, reason in reasons.items() if not reason]
    if not fit:
        raise _none(reasons, where)
    newest = max(one.standing.timeline or 0 for one in fit)
    best = [one for one in fit if (one.standing.timeline or 0) == newest]
    if followed is not None and (same := [one for one in best if one.standing.instance == followed.instance]):
        return same[0]
    if writes:
        _refuse_two(fit if followed is None and len(_systems(fit)) > 1 else best, where)
    return best[0]


def _systems(found: Sequence[AskedServer]) -> set[str]:
    return {one.standing.system for one in found if one.standing.system is not None}


def _refuse_two(best: Sequence[AskedServer], where: str) -> None:
    """Raise UnreachableError if these are several primaries, rather than several addresses of one."""
    if len({one.standing.instance for one in best}) < 2:
        return
    names = " and ".join(map(str, best))
    why = (
        "are primaries of different clusters, and neither is a copy of the other; name the servers of one cluster"
        if len(_systems(best)) > 1
        else f"both say that they are the primary, on timeline {best[0].standing.timeline or 0}, and each has what the "
        "other lacks; end one of them, or make it a standby of the other (pg_rewind)"
    )
    raise UnreachableError(f"{where}: {names} {why}", reason="no primary")


_STANDBY = "is a standby"


def _why_not(standing: Standing, followed: Standing | None) -> str:
    """Return why a server takes no writes of this process, as the end of a sentence; an empty string if it does."""
    if followed is not None and standing.is_of_another(followed):
        return "belongs to another cluster"
    if followed is not None and standing.is_left(followed):
        return f"is an old primary (timeline {standing.timeline}; this process follows timeline {followed.timeline})"
    return _STANDBY if standing.is_standby else ""


def _none(reasons: dict[AskedServer, str], where: str) -> UnreachableError | AccessError:
    listed = "; ".join(f"{one} {reason}" for one, reason in reasons.items())
    if all(reason == _STANDBY for reason in reasons.values()):
        return AccessError(
            f"{where}: {listed}, which takes no writes; name the primary in the url, or promote a standby (pg_ctl "
            "promote, or SELECT pg_promote())",
            reason="only standbys",
        )
    hint = "are the servers running, and are hosts and ports right?"
    if any(reason.startswith("is an old primary") for reason in reasons.values()):
        hint = "an old primary takes no writes of this run: end it, or make it a standby of the new one (pg_rewind)"
    elif _STANDBY in reasons.values():
        hint = "no primary can be reached: start it, promote a standby (pg_ctl promote), or name the primary in the url"
    return UnreachableError(f"{where}: no server is there: {listed}; {hint}", reason="no primary")
