"""The life of a group as `replaybuf trace` shows it."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any

from replaybuf import units
from replaybuf.cli.groups import ARCHIVE, age_of, lease_text
from replaybuf.cli.output import Column, console, iso, print_table, write
from replaybuf.cli.trace_step import batch_row
from replaybuf.redact import escape
from replaybuf.storage.sql.inspection.lives import Life, is_settled, stale_text, timeline


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
        "texts": f"gone with it; {ARCHIVE}" if there is None and any(map(is_settled, life.draws)) else None,
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
        return f"{there['status']}{trained}, {stale_text(there['staleness'])}"
    if life.replaced_by:
        return f"gone: replaced by {_uids(life.replaced_by)}"
    for one in reversed(life.draws):
        if is_settled(one):
            step = "" if one.step is None else f" at step {one.step}"
            return f"gone: trained on{step} by {one.worker or 'somebody'}"
    return f"gone: {life.happenings[-1].kind}" if life.happenings else "gone"


def _columns(now: datetime) -> list[Column]:
    return [
        Column("when", lambda r: "-" if r["at"] is None else iso(r["at"]), right=False),
        Column("ago", lambda r: units.age(age_of(r["at"], now)), spare=True),
        Column("what", lambda r: r["what"], right=False),
        Column("step", lambda r: "-" if r["step"] is None else str(r["step"])),
        Column("by", lambda r: r["worker"] or "-", right=False, text=True),
        Column("", lambda r: r["detail"] or "", right=False, text=True),
    ]
