"""`replaybuf show`: one group with its rollouts."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, TypeVar

import typer

from replaybuf import units
from replaybuf.cli.conversation import fields_of, print_conversation
from replaybuf.cli.escape import escape
from replaybuf.cli.groups import age_of, archived_at, lease_text, status_style, tags_text
from replaybuf.cli.options import Url, listing, option, url_and
from replaybuf.cli.output import Column, Output, console, iso, print_table, write
from replaybuf.errors import InputError
from replaybuf.storage.sql.inspection.metadata import Described, describe_group
from replaybuf.storage.sql.inspection.reader import Reader, open_reader

D = TypeVar("D", bound=Described)


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
    reader = open_reader(url)
    found, decoded = _read_full(reader, wanted) if full else (_read(reader, wanted), None)
    group, rollouts = found.group, found.rollouts
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


def _read(reader: Reader, uid: int) -> Described:
    return _there(reader, uid, reader.look(lambda look: describe_group(look, uid)))


def _read_full(reader: Reader, uid: int) -> tuple[Described, list[dict[Any, Any]]]:
    """Return the group and its rollouts as they were put."""
    from replaybuf.storage.sql.inspection.groups import show_group

    found = _there(reader, uid, reader.inspect(lambda tx: show_group(tx, uid, payload=True)))
    return found, found.decode()


def _there(reader: Reader, uid: int, found: D | None) -> D:
    if found is None:
        raise InputError(f"there is no group {uid} in {reader.where}: it was taken or deleted, or never was")
    return found


def _read_uid(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number.", param_hint="UID") from None


def _print_group(found: Described, *, with_prompt: bool) -> None:
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
        "archived": ago(archived_at(group)),
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
