"""`replaybuf show`: one group in full, several side by side, or the rollouts with extreme rewards."""

from __future__ import annotations

import math
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaybuf import units
from replaybuf.cli.app import TEXT, Buffer, OfTask, Out, Url, Where, argument, option, url_and_uids, whole_number
from replaybuf.cli.conversation import (
    Layout,
    ShownRollout,
    answers_of,
    fields_of,
    names_are_ours,
    print_beside,
    print_prompt,
    print_rollouts,
)
from replaybuf.cli.groups import ARCHIVE, gone_of, query_of
from replaybuf.cli.output import STYLES, Output, console, print_facts, print_table, write
from replaybuf.errors import InputError
from replaybuf.redact import escape_line
from replaybuf.storage.sql.inspection.groups import Described, describe_group, extreme_rollouts, facts_of
from replaybuf.storage.sql.inspection.lives import why_missing
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction, open_reader
from replaybuf.view.columns import ARRAYS, ROLLOUTS

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.group_payloads import StoredArray

Rollouts = list[dict[Any, Any]]


def read(reader: Reader, uid: int, *, full: bool = True) -> tuple[Described, Rollouts, list[StoredArray]]:
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
        return found, [], []
    rollouts, missing = decode_payload(uid, stored)
    if missing is not None:
        typer.echo(escape_line(missing), err=True)
    return found, rollouts, arrays_of(stored)


def show_several(reader: Reader, uids: list[int], output: Output, layout: Layout) -> None:
    """Show several groups: the best rollouts of each side by side, then the worst."""
    groups = [read(reader, uid)[:2] for uid in uids]
    chosen = []
    for kind, pick in (("best", max), ("worst", min)):
        of_groups = [
            answers_of(one.rollouts, decoded, f"{kind} of group {one.group['uid']}: ") for one, decoded in groups
        ]
        chosen.append([pick(answers, key=lambda one: _number(one.row["reward"])) for answers in of_groups if answers])
    if not output.for_people:
        _print_rows([one for answers in chosen for one in answers], output)
        return
    for found, decoded in groups:
        print_group(found, with_prompt=False)
        ours = decoded and names_are_ours(found.rollouts[0], decoded[0])
        print_prompt(decoded[0].get("message") if ours else found.group["prompt"])
        console().print()
    for answers in chosen:
        print_beside(answers, layout)


def _number(reward: float | None) -> float:
    return -math.inf if reward is None else reward


def show_extremes(
    reader: Reader,
    output: Output,
    layout: Layout,
    *,
    count: int,
    worst: bool,
    buffer: str | None,
    task: str | None,
    where: str | None,
) -> None:
    """Show rollouts with the lowest or the highest rewards side by side, after the prompt of each.

    The rollouts are of one buffer and task, or of all (None), and of groups that match a query.
    """
    if where is None:
        places = reader.read(lambda tx: extreme_rollouts(tx, buffer, task, count, worst=worst))
    else:
        from replaybuf.storage.sql.inspection.group_queries import extremes_matching  # a slow import

        query = query_of(where, task, None)
        places = reader.read(lambda tx: extremes_matching(tx, buffer, query, count, worst=worst))
    answers, prompts, left = [], {}, 0
    for uid, position in places:
        try:
            found, decoded, _ = read(reader, uid)
        except InputError:  # taken since the query
            left += 1
            continue
        prompt = decoded[position].get("message")
        prompts[uid] = found.group["prompt"] if prompt is None else prompt  # other field names: the metadata's prefix
        title = f"group {uid}, {found.group['task_name']}, "
        answers.append(answers_of(found.rollouts, decoded, title)[position])
    if not output.for_people:
        _print_rows(answers, output)
    elif not answers and not left:
        output.note("there are no completed rollouts with a reward")
    else:
        for uid, prompt in prompts.items():
            print_prompt(prompt, f" of group {uid}")
        print_beside(answers, layout)
    if left:
        output.note(f"{left} of them left the buffer while they were read")
    if where is None and (gone := reader.read(lambda tx: gone_of(tx, buffer, task))):
        output.note(gone)


def _print_rows(answers: list[ShownRollout], output: Output) -> None:
    output.rows([{**one.row, **fields_of(dict(one.fields))} for one in answers], [])


def print_group(found: Described, *, with_prompt: bool) -> None:
    """Print the metadata of a group, one field on each line."""
    group, facts = found.group, facts_of(found.group, found.now)
    facts |= {"buffer": group["buffer"] if found.several else "", "prompt": group["prompt"] if with_prompt else ""}
    print_facts(f"group {group['uid']}", facts, 14, {"status": STYLES[group["status"]]})


class Colours(StrEnum):
    """The values of --colour."""

    LOGPROBS = "logprobs"
    MASK = "mask"
    STEPS = "steps"


Colour = Annotated[
    Colours | None,
    option("--colour", "Colour tokens by logprobs, mask or steps (of the model that made them).", metavar="BY"),
]


def show(
    url: Url,
    output: Out = TEXT,
    uids: Annotated[list[str] | None, argument("[UID]...", "The uids of groups, from replaybuf ls.")] = None,
    full: Annotated[
        bool, option("--full", "Decode the payload: messages and responses in full, all fields in JSON.")
    ] = False,
    columns: Annotated[int | None, option("--columns", "So many responses side by side.", min=1, max=50)] = None,
    colour: Colour = None,
    worst: Annotated[int | None, option("--worst", "The answers with the lowest rewards.", min=1, max=100)] = None,
    best: Annotated[int | None, option("--best", "The answers with the highest rewards.", min=1, max=100)] = None,
    where: Where = None,
    task: OfTask = None,
    buffer: Buffer = None,
) -> None:
    """Show a group: its metadata, the prompt and its rollouts; or the best and worst rollouts.

    Of one group, prompt and responses are shown by their beginnings (200 characters). --full decodes the payload and
    shows all of it, and lists the arrays and tensors with the places of their bytes. --columns and --colour decode it,
    too, and show the responses side by side, up to 2,000 characters of each unless --full is given. Of several groups
    the best and the worst response of each are shown, side by side.
    --worst and --best choose rollouts from all groups, or from those of --task and --where, by looking at all
    of them: a million take a while. Of equal rewards one of each group is shown before a second one of any.

    Tokens are coloured where their texts are in the rollout (in a field of its own, or because a token is a character);
    else their ids are. --format csv prints the rollouts, json all there is.

    \b
    Examples:
      replaybuf show run.db 17
      replaybuf show run.db 17 --full | less
      replaybuf show run.db 17 --colour logprobs --columns 2
      replaybuf show run.db 17 18 19
      replaybuf show run.db --worst 3 --task math
      replaybuf show run.db --worst 3 --where '{"worker": "gpu-node-7"}'
      replaybuf show run.db 17 --full --format json | jq '.rollouts[].response'
    """
    layout = Layout(columns, colour, full)
    if worst is not None or best is not None:
        if uids or (worst is not None and best is not None):
            raise typer.BadParameter("give uids, or --worst, or --best", param_hint="--worst")
        chosen = {"buffer": buffer, "task": task, "where": where}
        show_extremes(open_reader(url), output, layout, count=worst or best or 1, worst=worst is not None, **chosen)
        return
    for name, given in {"--where": where, "--task": task, "--buffer": buffer}.items():
        if given is not None:
            raise typer.BadParameter("it goes with --worst and --best", param_hint=name)
    url, numbers = url_and_uids(url, uids)
    wanted = [whole_number(number, "UID") for number in numbers]
    reader = open_reader(url)
    beside = columns is not None or colour is not None
    if len(wanted) > 1:
        show_several(reader, wanted, output, layout)
        return
    decodes = full or beside
    found, decoded, arrays = read(reader, wanted[0], full=decodes)
    group, rollouts = found.group, found.rollouts
    shown_arrays = {"arrays": [_facts_of(one) for one in arrays]} if full else {}
    if decodes and not output.for_people:
        rollouts = [{**row, **fields_of(rollout)} for row, rollout in zip(rollouts, decoded, strict=True)]
    if output.printed(lambda: {**group, "rollouts": rollouts, **shown_arrays}, lambda: rollouts):
        return
    if not decodes:
        print_group(found, with_prompt=True)
        write("\n")
        rows = [row | {"rewards": units.reward(row["reward"], row["rewards"])} for row in found.rollouts]
        print_table(rows, ROLLOUTS)
    else:
        print_group(found, with_prompt=False)
        print_rollouts(rollouts, decoded, layout if beside or sys.stdout.isatty() else None)
        if full and arrays:
            _print_arrays(arrays)


def _facts_of(array: StoredArray) -> dict[str, Any]:
    facts = {name: getattr(array, name) for name in ("rollout", "name", "dtype", "nbytes", "where")}
    return {**facts, "shape": list(array.shape)}


def _print_arrays(arrays: list[StoredArray]) -> None:
    from replaybuf.storage.sql.inspection.group_payloads import footnotes

    write("\n")
    if large := [one for one in arrays if not one.small]:
        print_table(large, ARRAYS)
    write(f"{escape_line(note)}\n" for note in footnotes(arrays))
