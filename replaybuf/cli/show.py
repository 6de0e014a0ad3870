"""`replaybuf show`: groups in full, or the rollouts with extreme rewards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaybuf.cli.app import TEXT, Buffer, OfTask, Out, Url, Where, argument, option, whole_number
from replaybuf.cli.groups import ARCHIVE, gone_of, query_of
from replaybuf.cli.output import STYLES, Output, Row, console, print_facts, print_table, write
from replaybuf.common import units
from replaybuf.common.redact import escape, escape_line
from replaybuf.errors import InputError
from replaybuf.storage.sql.inspection.group_metadata import Described, describe_group, extreme_rollouts, facts_of
from replaybuf.storage.sql.inspection.lives import why_missing
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction, open_reader
from replaybuf.view.columns import ARRAYS, ROLLOUTS

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.group_payloads import StoredArray

Decoded = dict[Any, Any]

_LINES = "\n\t"
#: The fields of a rollout that are shown below its response.
_BELOW = ("tool_calls", "error_msg", "extra_fields")
_METADATA = frozenset({"status", "uid", "seq_staleness", "rollout_id"})
#: Longer lists of numbers (tokens) are shown by their length.
_FEW_NUMBERS = 32
#: Texts of extreme answers are cut after so many characters.
_CUT = 2000


def show(
    url: Url,
    output: Out = TEXT,
    uids: Annotated[list[str] | None, argument("UID", "The uids of groups, from replaybuf ls.")] = None,
    full: Annotated[
        bool, option("--full", "Decode the payload: messages and responses in full, all fields in JSON.")
    ] = False,
    worst: Annotated[int | None, option("--worst", "The answers with the lowest rewards.", min=1, max=100)] = None,
    best: Annotated[int | None, option("--best", "The answers with the highest rewards.", min=1, max=100)] = None,
    where: Where = None,
    task: OfTask = None,
    buffer: Buffer = None,
) -> None:
    """Show groups: their metadata, prompts and rollouts; or the best and worst rollouts.

    Of a group, prompt and responses are shown by their beginnings (200 characters). --full decodes the payload and
    shows all of it, and lists the arrays and tensors with the places of their bytes.

    --worst and --best choose rollouts from all groups, or from those of --task and --where, by looking at all of them:
    a million take a while. Of equal rewards one of each group is shown before a second one of any. Up to 2,000
    characters of each are shown, unless --full is given.

    --format csv prints the rollouts, json all there is.

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
        if uids or (worst is not None and best is not None):
            raise typer.BadParameter("give uids, or --worst, or --best", param_hint="--worst")
        _show_extremes(reader, output, worst or best or 1, worst is not None, buffer, task, where, full=full)
        return
    for name, given in {"--where": where, "--task": task, "--buffer": buffer}.items():
        if given is not None:
            raise typer.BadParameter("it goes with --worst and --best", param_hint=name)
    if not uids:
        raise typer.BadParameter("it is missing. --worst N and --best N choose the rollouts instead.", param_hint="UID")
    found = [_read(reader, number, full=full) for number in [whole_number(uid, "UID") for uid in uids]]
    values = [_value(*one) for one in found]
    rollouts = [row for one in values for row in one["rollouts"]]
    if output.printed(lambda: values[0] if len(values) == 1 else values, lambda: rollouts):
        return
    for number, (described, decoded, arrays) in enumerate(found):
        write(["\n"] if number else [])
        _print_group(described, decoded, arrays)


def _read(reader: Reader, uid: int, *, full: bool) -> tuple[Described, list[Decoded] | None, list[StoredArray]]:
    """Return the metadata of a group; if `full`, also its decoded rollouts and the descriptions of their arrays.

    Arrays outside the database that can't be read are left out, with a note on stderr. Raises InputError if the group
    doesn't exist, and DecodeError.
    """
    if full:
        from replaybuf.storage.sql.inspection.group_payloads import arrays_of, decode_payload, read_payload

    def work(tx: ReadTransaction) -> tuple[Described, Any] | str:
        found = describe_group(tx, uid)
        return why_missing(tx, uid) if found is None else (found, read_payload(tx, uid) if full else None)

    seen = reader.read(work)
    if isinstance(seen, str):
        keep = f" (replaybuf trace {reader.where} uid {uid} tells its life); {ARCHIVE} after training"
        raise InputError(f"there is no group {uid} in {reader.where}: {seen}{keep if seen.startswith('gone') else ''}")
    found, stored = seen
    if not full:
        return found, None, []
    rollouts, missing = decode_payload(uid, stored)
    if missing is not None:
        typer.echo(escape_line(missing), err=True)
    return found, rollouts, arrays_of(stored)


def _value(found: Described, decoded: list[Decoded] | None, arrays: Sequence[StoredArray]) -> dict[str, Any]:
    """Return a group for JSON."""
    if decoded is None:
        return {**found.group, "rollouts": found.rollouts}
    names = ("rollout", "name", "dtype", "nbytes", "where")
    described = [{**{name: getattr(one, name) for name in names}, "shape": list(one.shape)} for one in arrays]
    rollouts = [{**row, **_fields(rollout)} for row, rollout in zip(found.rollouts, decoded, strict=True)]
    return {**found.group, "rollouts": rollouts, "arrays": described}


def _fields(rollout: Decoded) -> dict[str, Any]:
    """Return the fields of a rollout for JSON, without those in the metadata."""
    return {str(name): value for name, value in rollout.items() if name not in _METADATA}


def _print_group(found: Described, decoded: list[Decoded] | None, arrays: Sequence[StoredArray]) -> None:
    group, facts = found.group, facts_of(found.group, found.now)
    facts |= {"buffer": group["buffer"] if found.several else "", "prompt": "" if decoded else group["prompt"]}
    print_facts(f"group {group['uid']}", facts, 14, {"status": STYLES[group["status"]]})
    if decoded is None:
        write("\n")
        print_table(
            [one | {"rewards": units.reward(one["reward"], one["rewards"])} for one in found.rollouts], ROLLOUTS
        )
        return
    _print_rollouts(found.rollouts, decoded)
    if arrays:
        from replaybuf.storage.sql.inspection.group_payloads import footnotes

        write("\n")
        if large := [one for one in arrays if not one.small]:
            print_table(large, ARRAYS)
        write(f"{escape_line(note)}\n" for note in footnotes(arrays))


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
    if where is None:
        places = reader.read(lambda tx: extreme_rollouts(tx, buffer, task, count, worst=worst))
    else:
        from replaybuf.storage.sql.inspection.group_queries import extremes_matching  # a slow import

        query = query_of(where, task, None)
        places = reader.read(lambda tx: extremes_matching(tx, buffer, query, count, worst=worst))
    groups: dict[int, tuple[Described, list[Decoded]]] = {}
    for uid in dict.fromkeys(uid for uid, _ in places):
        try:
            found, decoded, _ = _read(reader, uid, full=True)
        except InputError:  # taken since the query
            continue
        groups[uid] = found, decoded or []
    shown = [(groups[uid], position) for uid, position in places if uid in groups]
    rows = [{**found.rollouts[position], **_fields(decoded[position])} for (found, decoded), position in shown]
    if output.printed(lambda: rows, lambda: rows):
        return
    if not places:
        output.note("there are no completed rollouts with a reward")
    for (found, decoded), position in shown:
        of = f"group {found.group['uid']}, {found.group['task_name']}, "
        row, rollout = found.rollouts[position], decoded[position]
        _print_rollouts([row], [rollout], of, None if full else _CUT, found.group["prompt"])
    if left := len(places) - len(shown):
        output.note(f"{left} of them left the buffer while they were read")
    if where is None and (gone := reader.read(lambda tx: gone_of(tx, buffer, task))):
        output.note(gone)


# Conversations


def _print_rollouts(
    rows: Sequence[Row], decoded: Sequence[Decoded], of: str = "", cut: int | None = None, prompt: str | None = None
) -> None:
    """Print the messages, once if all rollouts share them, and every response.

    Rollouts with other names for these fields are printed field by field; a cut one by its metadata, with the beginning
    of its `prompt`.
    """
    messages = [rollout.get("message") for rollout in decoded]
    ours = all(_names_are_ours(row, rollout) for row, rollout in zip(rows, decoded, strict=True))
    shared = len({json.dumps(units.plain(one)) for one in messages}) == 1  # as texts: prompts may be arrays
    if ours and shared:
        _say(f"\nprompt of {of.split(',')[0]}" if of else "\nprompt", "bold")
        _print_messages(messages[0], cut)
    for row, rollout, message in zip(rows, decoded, messages, strict=True):
        _print_heading(row, of)
        if not ours and cut is None:
            _print_fields(_fields(rollout))
            continue
        if not ours:
            message, rollout = prompt, {"response": row["response"]}
        if not (ours and shared):
            _print_messages(message, cut)
            _say("[response]", "dim")
        _print_text(rollout.get("response"), cut)
        for name in _BELOW:
            if _is_there(rollout.get(name)):
                _say(f"[{name}]", "dim")
                _print_text(rollout[name], cut)


def _names_are_ours(row: Row, rollout: Decoded) -> bool:
    """Return whether a rollout has its prompt and response in the fields of RolloutState."""
    response_is_there = rollout.get("response") is not None or not row["response"]
    return rollout.get("message") is not None and response_is_there


def _print_heading(row: Row, of: str) -> None:
    from rich.text import Text

    facts = {
        "id": row["rollout_id"],
        "reward": units.reward(row["reward"], row["rewards"]),
        "staleness": row["staleness"],
        "step": row["oldest_model_step"],
        "tokens": row["response_tokens"],
        "finish": row["finish_reason"],
    }
    said = " ".join([row["status"], *(f"{name}={value}" for name, value in facts.items() if value is not None)])
    line = Text(f"\n{escape_line(of)}{' ' if of else ''}rollout {row['position']}", style="bold").append("  ")
    console().print(line.append(escape_line(said), style=f"not bold {STYLES.get(row['status'], '')}"), soft_wrap=True)


def _print_fields(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if value is None or (isinstance(value, (str, list, dict)) and not value):
            continue
        _say(f"[{name}]", "dim")
        if isinstance(value, list) and len(value) > _FEW_NUMBERS and isinstance(value[0], int | float):
            _print_text(f"{len(value):,} numbers", None)
        elif isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value):
            _print_messages(value, None)
        else:
            _print_text(value, None)


def _print_messages(messages: Any, cut: int | None) -> None:
    for message in messages if isinstance(messages, list) else [messages]:
        if not isinstance(message, dict) or message is messages:
            _print_text(message, cut)
            continue
        _say(f"[{message.get('role', 'message')}]", "dim")
        _print_text(message.get("content"), cut)
        rest = {name: one for name, one in message.items() if name not in ("role", "content") and _is_there(one)}
        if rest:
            _print_text(rest, cut)


def _print_text(value: Any, cut: int | None) -> None:
    """Print a text as it is, anything else as JSON. Long lines are wrapped by the terminal."""
    if value is None:
        _say("(none)", "dim")
        return
    text = units.as_text(units.joined_parts(value))
    more = f"… {len(text) - cut:,} more characters (--full)" if cut is not None and len(text) > cut else ""
    _say(text[:cut] + more)


def _say(text: str, style: str = "") -> None:
    from rich.text import Text

    console().print(Text(escape(text, keep=_LINES), style=style), soft_wrap=True)


def _is_there(value: Any) -> bool:
    return units.is_there(value) and not (isinstance(value, int) and not value)
