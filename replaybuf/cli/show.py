"""`replaybuf show`: one group with its rollouts."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from replaybuf import units
from replaybuf.cli.answers import (
    Extremes,
    Rollouts,
    answers_of,
    print_group,
    read,
    read_full,
    show_extremes,
    show_several,
)
from replaybuf.cli.beside import Layout, print_beside
from replaybuf.cli.conversation import fields_of, names_are_ours, print_conversation, print_prompt, text_of
from replaybuf.cli.groups import status_style
from replaybuf.cli.options import Buffer, OfTask, Url, Where, listing, option, url_and_uids
from replaybuf.cli.output import Column, Output, print_table, write
from replaybuf.cli.summary import reward_text
from replaybuf.storage.sql.inspection.metadata import Described
from replaybuf.storage.sql.inspection.reader import open_reader


class Colours(StrEnum):
    """What tokens are coloured by."""

    LOGPROBS = "logprobs"
    MASK = "mask"
    STEPS = "steps"


Colour = Annotated[
    Colours | None,
    option("--colour", metavar="BY", help="Colour tokens by logprobs, mask or steps (of the model that made them)."),
]


@listing
def show(
    url: Url,
    output: Output,
    uids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[UID]...", help="The uids of groups, from replaybuf ls.", show_default=False),
    ] = None,
    full: Annotated[
        bool, option("--full", help="Decode the payload: messages and responses in full, all fields with --json.")
    ] = False,
    columns: Annotated[
        int | None, option("--columns", metavar="N", min=1, max=50, help="So many responses side by side.")
    ] = None,
    colour: Colour = None,
    worst: Annotated[
        int | None, option("--worst", metavar="N", min=1, max=100, help="The lowest rewards, one of each group first.")
    ] = None,
    best: Annotated[
        int | None, option("--best", metavar="N", min=1, max=100, help="The highest rewards, one of each group first.")
    ] = None,
    where: Where = None,
    task: OfTask = None,
    buffer: Buffer = None,
) -> None:
    """Show a group: its metadata, the prompt and its rollouts; or the best and worst rollouts.

    Of one group, prompt and responses are shown by their beginnings (200 characters). --full decodes the payload and
    shows all of it. --columns and --colour decode it, too, and show the responses side by side, up to 2,000 characters
    of each unless --full is given. Of several groups the best and the worst response of each are shown, side by side.
    --worst and --best choose rollouts from all groups, or from those of --task and --where, by looking at all
    of them: a million take a while. One of each group is shown before a second one of any; of equals, the newest.

    Tokens are coloured where their texts are in the rollout (in a field of its own, or because a token is a character);
    else their ids are. --nl and --csv print the rollouts, --json prints all there is.

    \b
    Examples:
      replaybuf show run.db 17
      replaybuf show run.db 17 --full | less
      replaybuf show run.db 17 --colour logprobs --columns 2
      replaybuf show run.db 17 18 19
      replaybuf show run.db --worst 3 --task math
      replaybuf show run.db --worst 3 --where '{"worker": "gpu-node-7"}'
      replaybuf show run.db 17 --full --json | jq '.rollouts[].response'
    """
    layout = Layout(columns, colour, full)
    if worst is not None or best is not None:
        if uids or (worst is not None and best is not None):
            raise typer.BadParameter("give uids, or --worst, or --best", param_hint="--worst")
        order = Extremes(worst or best or 1, worst is not None, buffer, task, where)
        show_extremes(open_reader(url), order, output, layout)
        return
    for name, given in {"--where": where, "--task": task, "--buffer": buffer}.items():
        if given is not None:
            raise typer.BadParameter("it goes with --worst and --best", param_hint=name)
    url, numbers = url_and_uids(url, uids)
    wanted = [_read_uid(number) for number in numbers]
    reader = open_reader(url)
    beside = columns is not None or colour is not None
    if len(wanted) > 1:
        show_several(reader, wanted, output, layout)
        return
    found, decoded = read_full(reader, wanted[0]) if full or beside else (read(reader, wanted[0]), None)
    group, rollouts = found.group, found.rollouts
    if decoded is not None and not output.for_people:
        rollouts = [{**row, **fields_of(rollout)} for row, rollout in zip(rollouts, decoded, strict=True)]
    if output.format == "json":
        output.value({**group, "rollouts": rollouts})
    elif not output.for_people:
        output.rows(rollouts, [])
    elif decoded is None:
        print_group(found, with_prompt=True)
        write("\n")
        print_table(rollouts, _columns())
    else:
        print_group(found, with_prompt=False)
        _print_decoded(found, decoded, layout, beside=beside or sys.stdout.isatty())


def _print_decoded(found: Described, decoded: Rollouts, layout: Layout, *, beside: bool) -> None:
    if not beside or not all(map(names_are_ours, found.rollouts, decoded)):
        print_conversation(found.rollouts, decoded)
        return
    prompts = [rollout.get("message") for rollout in decoded]
    if len({text_of(prompt) for prompt in prompts}) == 1:
        print_prompt(prompts[0])
    else:
        for row, prompt in zip(found.rollouts, prompts, strict=True):
            print_prompt(prompt, f" of rollout {row['position']}")
    print_beside(answers_of(found, decoded, ""), layout)


def _read_uid(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number.", param_hint="UID") from None


def _columns() -> list[Column]:
    return [
        Column("#", lambda r: str(r["position"])),
        Column("id", lambda r: "-" if r["rollout_id"] is None else str(r["rollout_id"])),
        Column("status", lambda r: r["status"], right=False, style=status_style),
        Column("stale", lambda r: units.number(r["staleness"])),
        Column("step", lambda r: units.number(r["oldest_model_step"])),
        Column("reward", lambda r: reward_text(r) or "-"),
        Column("tokens", lambda r: units.number(r["response_tokens"])),
        Column("finish", lambda r: r["finish_reason"] or "-", right=False),
        Column("response", lambda r: r["response"] or "", right=False, text=True),
    ]
