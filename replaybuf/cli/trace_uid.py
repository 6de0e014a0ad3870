"""The life of a group as `replaybuf trace` shows it."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any

from replaybuf import units
from replaybuf.cli.groups import ARCHIVE, age_of, archived_at, lease_text
from replaybuf.cli.output import Column, console, iso, print_table, write
from replaybuf.cli.trace_step import batch_row
from replaybuf.redact import escape
from replaybuf.storage.sql.inspection.drawn_batches import Batch
from replaybuf.storage.sql.inspection.traces import Life

#: What the kinds of events are called in a group's life; others are shown as they are.
_KINDS = {
    "lease_lapsed": "lease over, back",
    "given_back": "given back",
    "set_aside": "set aside",
}

_RETURNS = ("lease_lapsed", "given_back")


def life_value(life: Life) -> dict[str, Any]:
    """Return a group's life for programs."""
    return {
        "uid": life.uid,
        **asdict(life.origin),
        "now": _now(life),
        "group": life.there,
        "replaces": life.replaces,
        "replaced_by": life.replaced_by,
        "checkpoints": life.checkpoints,
        "draws": [
            batch_row(one) | {"reward_then": one.members[0].reward, "staleness_then": one.members[0].staleness}
            for one in life.draws
        ],
        "timeline": timeline(life),
    }


def timeline(life: Life) -> list[dict[str, Any]]:
    """Return what befell a group, in order: when, what, by whom, at which train step."""
    put = life.origin
    rows = []
    if put.created_at is not None:
        rows.append(_row(put.created_at, "put", put.worker, put.train_step, None))
    for one in life.draws:
        rows.append(
            _row(one.taken_at, "leased" if one.lease is not None else "taken", one.worker, one.step, _drawn(one))
        )
        if _came_back(life, one):
            rows.append(_row(one.taken_at, "came back", None, None, "given back, or the lease was over"))
    for event in life.happenings:
        rows.append(_row(event.at, _KINDS.get(event.kind, event.kind), event.worker, event.step, event.detail))
    if life.there is not None and (archived := archived_at(life.there)) is not None:
        at = max([archived, *(one.taken_at for one in life.draws)])  # a draw is recorded after what it does
        rows.append(_row(at, "consumed", None, life.there["trained_step"], "archived"))
    rows.sort(key=lambda row: row["at"].timestamp() if row["at"] else 0.0)
    return rows


def _row(at: datetime | None, what: str, worker: str | None, step: int | None, detail: str | None) -> dict[str, Any]:
    return {"at": at, "what": what, "worker": worker, "step": step, "detail": detail}


def _drawn(one: Batch) -> str:
    mine = one.members[0]
    facts = [f"batch {one.id} of {one.groups} groups"]
    if mine.staleness is not None:
        facts.append(_stale(mine.staleness))
    if one.lease is not None and one.settled < one.groups:
        facts.append(f"{one.settled} of them consumed")
    return ", ".join(facts)


def _came_back(life: Life, one: Batch) -> bool:
    """Return whether the group came back from a draw, and no event says so."""
    later = [other.taken_at for other in life.draws if other.id > one.id]
    told = (event for event in life.happenings if event.kind in _RETURNS and event.at >= one.taken_at)
    if not one.back or any(not later or event.at <= later[0] for event in told):
        return False
    if one.came_back or later:
        return one.came_back and not life.replaced_by
    return life.there is not None and life.there["leased_until"] is None and life.there["trained_step"] is None


def _stale(staleness: int) -> str:
    return f"{staleness} step{'' if staleness == 1 else 's'} stale"


def print_life(life: Life) -> None:
    """Print a group's life: where it came from, where it is, and what befell it in between."""
    from rich.text import Text

    out = console()
    of = f" of {life.origin.task_name}" if life.origin.task_name else ""
    out.print(Text(escape(f"group {life.uid}{of}"), style="bold"), soft_wrap=True)
    for name, value in _facts(life).items():
        if value:
            out.print(Text(f"  {name:<13}").append(escape(value)), soft_wrap=True)
    if rows := timeline(life):
        write(["\n"])
        print_table(rows, _columns(life.now))


def _facts(life: Life) -> dict[str, str | None]:
    put, there = life.origin, life.there
    return {
        "buffer": put.buffer if life.several else None,
        "put by": put.worker,
        "weights": None if put.oldest_model_step is None else f"of step {put.oldest_model_step}",
        "reward": None if put.reward is None else f"{put.reward:.3f}",
        "now": _now(life),
        "replaces": _uids(life.replaces),
        "replaced by": _uids(life.replaced_by),
        "checkpoints": ", ".join(map(str, life.checkpoints)),
        "error": None if there is None else there["error"],
        "prompt": None if there is None else there["prompt"],
        "texts": f"gone with it; {ARCHIVE}" if there is None and any(map(_is_settled, life.draws)) else None,
    }


def _uids(uids: Any) -> str:
    return ", ".join(f"group {uid}" for uid in uids)


def _now(life: Life) -> str:
    """Return where a group is."""
    there = life.there
    if there is not None:
        if there["leased_until"] is not None:
            return f"leased by {there['leased_by'] or 'somebody'}, {lease_text(there['leased_until'], life.now)}"
        trained = "" if there["trained_step"] is None else f", trained on at step {there['trained_step']}"
        return f"{there['status']}{trained}, {_stale(there['staleness'])}"
    if life.replaced_by:
        return f"gone: replaced by {_uids(life.replaced_by)}"
    for one in reversed(life.draws):
        if _is_settled(one):
            step = "" if one.step is None else f" at step {one.step}"
            return f"gone: trained on{step} by {one.worker or 'somebody'}"
    return f"gone: {life.happenings[-1].kind}" if life.happenings else "gone"


def _is_settled(one: Batch) -> bool:
    """Return whether the draw was for good."""
    return one.lease is None or one.settled == one.groups


def _columns(now: datetime) -> list[Column]:
    return [
        Column("when", lambda r: "-" if r["at"] is None else iso(r["at"]), right=False),
        Column("ago", lambda r: units.age(age_of(r["at"], now)), spare=True),
        Column("what", lambda r: r["what"], right=False),
        Column("step", lambda r: "-" if r["step"] is None else str(r["step"])),
        Column("by", lambda r: r["worker"] or "-", right=False, text=True),
        Column("", lambda r: r["detail"] or "", right=False, text=True),
    ]
