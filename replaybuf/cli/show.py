"""`replaybuf show`: groups in full, or the rollouts with extreme rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaybuf.cli.commands import TEXT, Buffer, OfTask, Out, Url, Where, argument, option
from replaybuf.cli.groups import ARCHIVE
from replaybuf.cli.output import STYLES, Output, Row, console, print_facts, print_json, print_table, write
from replaybuf.common import units
from replaybuf.common.redact import escape, escape_line
from replaybuf.errors import DecodeError, InputError
from replaybuf.rules.query import query_of
from replaybuf.storage.sql.inspection.group_metadata import (
    Described,
    describe_group,
    facts_of,
    unknown_task,
)
from replaybuf.storage.sql.inspection.lives import why_missing
from replaybuf.storage.sql.inspection.reader import Reader, Transaction, open_reader
from replaybuf.view.columns import ROLLOUTS, annotated

if TYPE_CHECKING:
    from replaybuf.view.conversation import Message, Text

Decoded = dict[Any, Any]

_WHITESPACE = "\n\t"
_METADATA = frozenset({"status", "uid", "seq_staleness", "rollout_id"})
#: Texts of extreme answers are cut after so many characters.
_CUT_CHARACTERS = 2000


def show(
    url: Url,
    output: Out = TEXT,
    uid: Annotated[int | None, argument("UID", "The uid of a group, from replaybuf ls.")] = None,
    full: Annotated[
        bool, option("--full", "Decode the payload: messages and responses in full, all fields in JSON.")
    ] = False,
    worst: Annotated[int | None, option("--worst", "The answers with the lowest rewards.", min=1, max=100)] = None,
    best: Annotated[int | None, option("--best", "The answers with the highest rewards.", min=1, max=100)] = None,
    where: Where = None,
    task: OfTask = None,
    buffer: Buffer = None,
) -> None:
    """Show a group: its metadata, prompt and rollouts; or the best and worst rollouts of all.

    Of a group, prompt and responses are shown by their beginnings (200 characters). --full decodes the payload and
    shows all of it, arrays and tensors by their types and shapes.

    --worst and --best choose rollouts from all groups, or from those of --task and --where, by looking at all of them:
    a million take a while. Of equal rewards one of each group is shown before a second one of any. Up to 2,000
    characters of each are shown, unless --full is given.

    \b
    Examples:
      replaybuf show run.db 17
      replaybuf show run.db 17 --full | less
      replaybuf show run.db --worst 3 --task math
      replaybuf show run.db --worst 3 --where '{"worker": "gpu-node-7"}'
      replaybuf show run.db 17 --full --format json | jq '.rollouts[].response'
    """
    reader = open_reader(url)
    if worst is not None or best is not None:
        if uid is not None or (worst is not None and best is not None):
            raise typer.BadParameter("give a uid, or --worst, or --best", param_hint="--worst")
        _show_extremes(reader, output, worst or best or 1, worst is not None, buffer, task, where, full=full)
        return
    for name, value in {"--where": where, "--task": task, "--buffer": buffer}.items():
        if value is not None:
            raise typer.BadParameter("it goes with --worst and --best", param_hint=name)
    if uid is None:
        raise typer.BadParameter("it is missing. --worst N and --best N choose the rollouts instead.", param_hint="UID")
    try:
        described, decoded = _read(reader, uid, full=full)
    except DecodeError as error:
        raise DecodeError(f"{error} (without --full its metadata can be shown)") from error
    if output.for_people:
        _print_group(described, decoded)
    else:
        print_json(_value(described, decoded))


def _read(reader: Reader, uid: int, *, full: bool) -> tuple[Described, list[Decoded] | None]:
    """Return the metadata of a group; if `full`, also its decoded rollouts.

    Arrays outside the database that can't be read are left out, with a note on stderr. Raises InputError if the group
    doesn't exist, and DecodeError.
    """
    if full:
        from replaybuf.storage.sql.inspection.group_payloads import decode_payload, read_payload

    def work(tx: Transaction) -> tuple[Described, Any] | str:
        described = describe_group(tx, uid)
        return why_missing(tx, uid) if described is None else (described, read_payload(tx, uid) if full else None)

    result = reader.read(work)
    if isinstance(result, str):
        trace_hint = f" (replaybuf trace {reader.where} uid {uid} tells its life)" if result.startswith("gone") else ""
        archive_hint = f"; {ARCHIVE} after training" if result.startswith("gone: trained on") else ""
        raise InputError(f"there is no group {uid} in {reader.where}: {result}{trace_hint}{archive_hint}")
    described, payload = result
    if not full:
        return described, None
    rollouts, missing = decode_payload(uid, payload)
    if missing is not None:
        typer.echo(escape_line(missing), err=True)
    return described, rollouts


def _value(described: Described, decoded: list[Decoded] | None) -> dict[str, Any]:
    """Return a group for JSON."""
    if decoded is None:
        return {**described.group, "rollouts": described.rollouts}
    rollouts = [{**row, **_fields(rollout)} for row, rollout in zip(described.rollouts, decoded, strict=True)]
    return {**described.group, "rollouts": rollouts}


def _fields(rollout: Decoded) -> dict[str, Any]:
    """Return the fields of a rollout for JSON, without those in the metadata."""
    return {str(name): value for name, value in rollout.items() if name not in _METADATA}


def _print_group(described: Described, decoded: list[Decoded] | None) -> None:
    group, facts = described.group, facts_of(described.group, described.now)
    facts |= {"buffer": group["buffer"] if described.several else "", "prompt": "" if decoded else group["prompt"]}
    print_facts(f"group {group['uid']}", facts, 14, {"status": STYLES[group["status"]]})
    if decoded is not None:
        _print_rollouts(described.rollouts, decoded, group["prompt"])
        return
    write("\n")
    rows = [row | {"rewards": units.reward(row["reward"], row["rewards"])} for row in described.rollouts]
    rows = [row if row["parent"] is None else row | {"position": f"└ {row['position']}"} for row in rows]
    print_table(rows, annotated(ROLLOUTS, rows))


def _show_extremes(
    reader: Reader,
    output: Output,
    count: int,
    worst: bool,
    buffer: str | None,
    task: str | None,
    where: str | None,
    *,
    full: bool,
) -> None:
    """Show rollouts with the lowest or the highest rewards, after the prompt of each.

    The rollouts are of one buffer and task, or of all (None), and of groups that match a query.
    """
    from replaybuf.storage.sql.inspection import group_queries  # imports SQLAlchemy

    query = query_of(where, task, None)
    places = reader.read(lambda tx: group_queries.extremes_matching(tx, buffer, query, count, worst=worst))
    groups: dict[int, tuple[Described, list[Decoded]]] = {}
    for uid in dict.fromkeys(uid for uid, _ in places):
        try:
            described, decoded = _read(reader, uid, full=True)
        except (InputError, DecodeError) as error:  # taken since the query, or damaged
            typer.echo(escape_line(f"{error}; its answers are left out"), err=True)
        else:
            groups[uid] = described, decoded or []
    pairs = [(groups[uid], position) for uid, position in places if uid in groups]
    rows = [{**described.rollouts[position], **_fields(decoded[position])} for (described, decoded), position in pairs]
    if not output.for_people:
        print_json(rows)
        return
    if not places:
        unknown = reader.read(lambda tx: unknown_task(tx, buffer, task))
        output.note(unknown or "there are no completed rollouts with a reward")
    for (described, decoded), position in pairs:
        worker = f"by {described.group['worker']}, " if described.group["worker"] else ""
        heading = f"group {described.group['uid']}, {described.group['task_name']}, {worker}"
        cut = None if full else _CUT_CHARACTERS
        _print_rollouts([described.rollouts[position]], [decoded[position]], described.group["prompt"], heading, cut)


# Conversations


def _print_rollouts(
    rows: Sequence[Row], decoded: Sequence[Decoded], prompt: str | None, heading: str = "", cut: int | None = None
) -> None:
    """Print the messages, once if all rollouts share them, then of each rollout its response and its other fields.

    Texts are cut after so many characters; rollouts that are cut are shown without other fields.
    """
    from replaybuf.view.conversation import conversation_of

    talks = [conversation_of(rollout, row, prompt, characters=cut) for row, rollout in zip(rows, decoded, strict=True)]
    shared = all(talk.messages == talks[0].messages for talk in talks)
    if shared:
        _print_plain(f"\nprompt of {heading.split(',')[0]}" if heading else "\nprompt", "bold")
        _print_messages(talks[0].messages)
    for row, talk in zip(rows, talks, strict=True):
        _print_heading(row, heading)
        if not shared:
            _print_messages(talk.messages)
            _print_plain("[response]", "dim")
        _print_text(talk.response)
        parts = {"error": talk.error, **(talk.fields if cut is None else {})}
        for name, text in parts.items():
            if text is not None:
                _print_plain(f"[{name}]", "dim")
                _print_text(text)


def _print_heading(row: Row, heading: str) -> None:
    from rich.text import Text

    facts = {
        "id": row["rollout_id"],
        "reward": units.reward(row["reward"], row["rewards"]),
        "staleness": row["staleness"],
        "step": row["oldest_model_step"],
        "tokens": row["response_tokens"],
        "finish": row["finish_reason"],
        **{name: units.annotation(value) for name, value in row["annotations"].items()},
    }
    summary = " ".join([row["status"], *(f"{name}={value}" for name, value in facts.items() if value is not None)])
    place = f"rollout {row['position']}" if row["parent"] is None else f"└ {row['position']}, after {row['parent']}"
    line = Text(f"\n{escape_line(heading)}{' ' if heading else ''}{place}", style="bold").append("  ")
    console().print(line.append(escape_line(summary), style=f"not bold {STYLES.get(row['status'], '')}"))


def _print_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        _print_plain(f"[{message.role}]", "dim")
        _print_text(message.content)
        if message.rest is not None:
            _print_text(message.rest)


def _print_text(text: Text) -> None:
    """Print a text, and how much of it is missing. Long lines are wrapped by the terminal."""
    remainder = f"… {text.length - len(text.text):,} more characters (--full)" if text.is_cut else ""
    _print_plain(text.text + remainder)


def _print_plain(text: str, style: str = "") -> None:
    from rich.text import Text

    console().print(Text(escape(text, keep=_WHITESPACE), style=style), soft_wrap=True)
