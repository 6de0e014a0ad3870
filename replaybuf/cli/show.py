"""`replaybuf show`: one group with its rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import typer
from sqlalchemy import Connection

from replaybuf import units
from replaybuf.cli.conversation import fields_of, print_conversation
from replaybuf.cli.escape import escape
from replaybuf.cli.groups import (
    EVERYWHERE,
    age_of,
    buffers_of,
    find_groups,
    find_rollouts,
    lease_text,
    now_of,
    status_style,
    tags_text,
)
from replaybuf.cli.options import Url, listing, option, url_and
from replaybuf.cli.output import Column, Output, console, iso, print_table, write
from replaybuf.errors import DecodeError, InputError
from replaybuf.query import LogicNode, ScalarNode
from replaybuf.storage.sql.inspection import open_reader, read
from replaybuf.storage.sql.statements.matching import read_groups
from replaybuf.storage.sql.statements.rows import GroupRow


@listing
def show(
    url: Url,
    output: Output,
    uid: Annotated[
        str | None, typer.Argument(metavar="UID", help="The uid of a group, from replaybuf ls.", show_default=False)
    ] = None,
    full: Annotated[
        bool, option("--full", help="Decode the payload: messages and responses in full, all fields with --json.")
    ] = False,
) -> None:
    """Show one group: its metadata, the prompt and its rollouts.

    Prompt and responses are shown by their beginnings (200 characters) unless --full is given. --nl and --csv print the
    rollouts, --json prints all there is.

    \b
    Examples:
      replaybuf show run.db 17
      replaybuf show run.db 17 --full | less
      replaybuf show run.db 17 --full --json | jq '.rollouts[].response'
    """
    url, number = url_and(url, uid, "UID")
    wanted = _read_uid(number)
    where = open_reader(url).where

    def find(connection: Connection) -> _Found:
        groups = find_groups(connection, EVERYWHERE, ScalarNode("uid", "$eq", wanted), (), 1)
        if not groups:
            raise InputError(f"there is no group {wanted} in {where}: it was taken or deleted, or never was")
        stored = read_groups(connection, EVERYWHERE, [wanted], LogicNode("$and", ())) if full else []
        several = len(buffers_of(connection)) > 1
        return _Found(
            groups[0], find_rollouts(connection, wanted), stored[0] if stored else None, now_of(connection), several
        )

    found = read(url, find)
    group, rollouts, stored = found.group, found.rollouts, found.stored
    decoded = _decode(stored) if stored else None
    if decoded is not None and not output.for_people:
        rollouts = [{**row, **fields_of(rollout)} for row, rollout in zip(rollouts, decoded, strict=True)]
    if output.format == "json":
        output.value({**group, "rollouts": rollouts})
    elif not output.for_people:
        output.rows(rollouts, [])
    else:
        _print_group(found, with_prompt=decoded is None)
        if decoded is None:
            write("\n")
            print_table(rollouts, _columns())
        else:
            print_conversation(rollouts, decoded)


@dataclass(slots=True)
class _Found:
    """A group, its rollouts, its payload if asked for; the time then, and whether there are other buffers."""

    group: dict[str, Any]
    rollouts: list[dict[str, Any]]
    stored: GroupRow | None
    now: datetime
    several: bool


def _read_uid(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number.", param_hint="UID") from None


def _decode(stored: GroupRow) -> list[Any]:
    """The rollouts as dicts, whatever class they were put as."""
    from replaybuf.codec.payload import Codec
    from replaybuf.rollouts.rollout_type import RolloutType

    try:
        return stored.decode(Codec(RolloutType(dict))).item
    except DecodeError as error:
        raise DecodeError(f"group {stored.uid}: {error} (without --full its metadata can be shown)") from error


def _print_group(found: _Found, *, with_prompt: bool) -> None:
    from rich.text import Text

    group, now = found.group, found.now

    def ago(moment: datetime | None) -> str | None:
        return None if moment is None else f"{iso(moment)} ({units.age(age_of(moment, now))} ago)"

    until = group["leased_until"]
    facts = {
        "buffer": group["buffer"] if found.several else None,
        "status": group["status"],
        "leased": None if until is None else f"until {iso(until)} ({lease_text(until, now)})",
        "deliveries": group["deliveries"] and units.number(group["deliveries"]),
        "task": group["task_name"],
        "staleness": units.number(group["staleness"]),
        "reward": units.number(group["reward"], 3),
        "priority": f"{group['priority']:g}",
        "times sampled": units.number(group["times_sampled"]),
        "created": ago(group["created_at"]),
        "archived": ago(group["archived_at"]),
        "rollouts": units.number(group["rollouts"]),
        "tokens": f"{units.number(group['prompt_tokens'])} prompt, {units.number(group['response_tokens'])} response",
        "finished by": group["finish_reasons"],
        "payload": units.size(group["bytes"]),
        "key": group["key"],
        "tags": tags_text(group["tags"]),
        "error": group["error"],
        "prompt": group["prompt"] if with_prompt else None,
    }
    out = console()
    out.print(Text(f"group {group['uid']}", style="bold"))
    for name, value in facts.items():
        if value:
            style = status_style(group) if name == "status" else ""
            out.print(Text(f"  {name:<14}").append(escape(str(value)), style=style), soft_wrap=True)


def _columns() -> list[Column]:
    return [
        Column("#", lambda r: str(r["position"])),
        Column("id", lambda r: "-" if r["rollout_id"] is None else str(r["rollout_id"])),
        Column("status", lambda r: r["status"], right=False, style=status_style),
        Column("stale", lambda r: units.number(r["staleness"])),
        Column("step", lambda r: units.number(r["oldest_model_step"])),
        Column("reward", lambda r: units.number(r["reward"], 3)),
        Column("tokens", lambda r: units.number(r["response_tokens"])),
        Column("finish", lambda r: r["finish_reason"] or "-", right=False),
        Column("response", lambda r: r["response"] or "", right=False, text=True),
    ]
