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
    is_read_only: bool = False
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


#: The default of readers: the newest primary, since an old one may be back without some commits; else a standby.
#: (Not one of libpq's values.)
PREFER_PRIMARY = "prefer-primary"

#: For a server that wasn't queried.
UNKNOWN = Standing()

_ASK = """
SELECT {system}, CASE WHEN pg_is_in_recovery() THEN NULL
       ELSE CAST(CAST('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) AS bit(32)) AS bigint) END,
    pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', pg_postmaster_start_time(), pg_backend_pid()
"""
#: Query of a server's `Standing`.
ASK = _ASK.format(system="(SELECT CAST(system_identifier AS text) FROM pg_control_system())")
#: The same without the cluster's id, which needs a privilege.
ASK_LESS = _ASK.format(system="CAST(NULL AS text)")
#: The same for servers that only speak PostgreSQL's protocol and have no WAL.
ASK_LITTLE = "SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on'"


@dataclass(frozen=True, slots=True)
class AskedServer:
    """A server that was queried: its standing, or the `problem` that prevented the query."""

    host: Host | None
    standing: Standing = UNKNOWN
    problem: str = ""

    def __str__(self) -> str:
        return "the server" if self.host is None else str(self.host)


def choose(found: Sequence[AskedServer], attrs: str, followed: Standing | None, where: str) -> AskedServer:
    """Return the server to use, out of the queried ones in the order of the URL.

    `attrs` is one of `SESSION_ATTRS`, or PREFER_PRIMARY; of several primaries, the highest timeline is chosen.
    Raises UnreachableError, AccessError.
    """
    there = [one for one in found if not one.problem]
    if attrs == "prefer-standby":
        there.sort(key=lambda one: not one.standing.is_standby)
    elif attrs == PREFER_PRIMARY:
        there.sort(key=lambda one: -(one.standing.timeline or 0))  # standbys, whose timeline isn't known, are last
    fit = [one for one in there if not _why_not(one.standing, attrs, followed)]
    if not fit:
        raise _none(found, attrs, followed, where)
    if attrs not in ("read-write", "primary"):
        return fit[0]
    newest = max(one.standing.timeline or 0 for one in fit)
    best = [one for one in fit if (one.standing.timeline or 0) == newest]
    if same := [one for one in best if followed is not None and one.standing.instance == followed.instance]:
        return same[0]
    _refuse_two(fit if followed is None and len(_systems(fit)) > 1 else best, where)
    return best[0]


def _systems(found: Sequence[AskedServer]) -> set[str]:
    return {one.standing.system for one in found if one.standing.system is not None}


def _refuse_two(best: Sequence[AskedServer], where: str) -> None:
    """Raise UnreachableError if these are several primaries, rather than several addresses of one."""
    if len({one.standing.instance for one in best}) < 2:
        return
    names = " and ".join(map(str, best))
    if len(_systems(best)) > 1:
        raise UnreachableError(
            f"{where}: {names} are primaries of different clusters, and neither is a copy of the other; name the "
            "servers of one cluster",
            reason="no primary",
        )
    raise UnreachableError(
        f"{where}: {names} both say that they are the primary, on timeline {best[0].standing.timeline or 0}, and each "
        "has what the other lacks; end one of them, or make it a standby of the other (pg_rewind)",
        reason="no primary",
    )


def _why_not(standing: Standing, attrs: str, followed: Standing | None) -> str:
    """Return why a server isn't suitable, as the end of a sentence; an empty string if it is."""
    writes = attrs in ("read-write", "primary")
    if followed is not None and writes:
        if standing.is_of_another(followed):
            return "belongs to another cluster"
        if standing.is_left(followed):
            return (
                f"is an old primary (timeline {standing.timeline}; this process follows timeline {followed.timeline})"
            )
    if writes and standing.is_standby:
        return "is a standby"
    if attrs == "read-write" and standing.is_read_only:
        return "is read-only (default_transaction_read_only)"
    if attrs == "standby" and not standing.is_standby:
        return "is a primary"
    if attrs == "read-only" and not (standing.is_standby or standing.is_read_only):
        return "can be written to"
    return ""


def _none(
    found: Sequence[AskedServer], attrs: str, followed: Standing | None, where: str
) -> UnreachableError | AccessError:
    reasons = {one: one.problem or _why_not(one.standing, attrs, followed) for one in found}
    listed = "; ".join(f"{one} {reason}" for one, reason in reasons.items())
    writes = attrs in ("read-write", "primary")
    if writes and all(reason == "is a standby" for reason in reasons.values()):
        return AccessError(
            f"{where}: {listed}, which takes no writes; name the primary in the url, or promote a standby (pg_ctl "
            "promote, or SELECT pg_promote())",
            reason="only standbys",
        )
    hint = "are the servers running, and are hosts and ports right?"
    if any(reason.startswith("is an old primary") for reason in reasons.values()):
        hint = "an old primary takes no writes of this run: end it, or make it a standby of the new one (pg_rewind)"
    elif any(reason == "is a standby" for reason in reasons.values()) and writes:
        hint = "no primary can be reached: start it, promote a standby (pg_ctl promote), or name the primary in the url"
    return UnreachableError(f"{where}: no server is {_WANTED[attrs]}: {listed}; {hint}", reason="no primary")


_WANTED = {
    "any": "there",
    "read-write": "a primary that can be written to",
    "primary": "a primary",
    "read-only": "read-only",
    "standby": "a standby",
    "prefer-standby": "there",
    PREFER_PRIMARY: "there",
}
