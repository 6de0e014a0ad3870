"""Groups and rollouts that `show` is asked for: read in full, one, several, or those with extreme rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from replaybuf import units
from replaybuf.cli.beside import Answer, Layout, print_beside
from replaybuf.cli.conversation import fields_of, names_are_ours, print_prompt
from replaybuf.cli.escape import escape
from replaybuf.cli.groups import age_of, archived_at, lease_text, status_style, tags_text
from replaybuf.cli.output import Output, console, iso
from replaybuf.cli.queries import query_of
from replaybuf.errors import InputError
from replaybuf.storage.sql.inspection.metadata import Described, describe_group, extreme_rollouts
from replaybuf.storage.sql.inspection.reader import Reader

Rollouts = list[dict[Any, Any]]
D = TypeVar("D", bound=Described)


def read(reader: Reader, uid: int) -> Described:
    """Return the metadata of a group. Raises InputError when it isn't there."""
    return _there(reader, uid, reader.look(lambda look: describe_group(look, uid)))


def read_full(reader: Reader, uid: int) -> tuple[Described, Rollouts]:
    """Return the metadata of a group and its rollouts as they were put. Raises InputError and DecodeError."""
    from replaybuf.storage.sql.inspection.groups import show_group

    found = _there(reader, uid, reader.inspect(lambda tx: show_group(tx, uid, payload=True)))
    return found, found.decode()


def _there(reader: Reader, uid: int, found: D | None) -> D:
    if found is None:
        raise InputError(f"there is no group {uid} in {reader.where}: it was taken or deleted, or never was")
    return found


def answers_of(found: Described, decoded: Rollouts, of: str) -> list[Answer]:
    """Return the rollouts of a group as answers, with `of` before their titles."""
    pairs = zip(found.rollouts, decoded, strict=True)
    return [Answer(f"{of}rollout {row['position']}", row, rollout) for row, rollout in pairs]


def show_several(reader: Reader, uids: list[int], output: Output, layout: Layout) -> None:
    """Show several groups: the best rollouts of each side by side, then the worst."""
    groups = [read_full(reader, uid) for uid in uids]
    chosen = []
    for kind, pick in (("best", max), ("worst", min)):
        of_groups = [answers_of(one, decoded, f"{kind} of group {one.group['uid']}: ") for one, decoded in groups]
        chosen.append([pick(answers, key=_reward_of) for answers in of_groups if answers])
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


def _reward_of(one: Answer) -> float:
    reward = one.row["reward"]
    return -math.inf if reward is None else float(reward)


@dataclass(frozen=True, slots=True)
class Extremes:
    """The rollouts with the lowest or the highest rewards of one buffer and task, or of all; of groups that match."""

    count: int
    worst: bool
    buffer: str | None
    task: str | None
    where: str | None


def show_extremes(reader: Reader, wanted: Extremes, output: Output, layout: Layout) -> None:
    """Show rollouts with the lowest or the highest rewards side by side, after the prompt of each."""
    places = _places(reader, wanted)
    answers, prompts = [], {}
    for uid, position in places:
        found, decoded = read_full(reader, uid)
        prompt = decoded[position].get("message")
        prompts[uid] = found.group["prompt"] if prompt is None else prompt  # of classes with other names: its beginning
        answers.append(answers_of(found, decoded, f"group {uid}, {found.group['task_name']}, ")[position])
    if not output.for_people:
        _print_rows(answers, output)
    elif not answers:
        output.note("there are no completed rollouts with a reward")
    else:
        for uid, prompt in prompts.items():
            print_prompt(prompt, f" of group {uid}")
        print_beside(answers, layout)


def _places(reader: Reader, wanted: Extremes) -> list[tuple[int, int]]:
    count, worst = wanted.count, wanted.worst
    if wanted.where is None:
        return reader.look(lambda look: extreme_rollouts(look, wanted.buffer, wanted.task, count, worst=worst))
    from replaybuf.storage.sql.inspection.groups import extremes_matching  # takes its time to import

    query = query_of(wanted.where, wanted.task, None)
    return reader.inspect(lambda tx: extremes_matching(tx, wanted.buffer, query, count, worst=worst))


def _print_rows(answers: list[Answer], output: Output) -> None:
    output.rows([{**one.row, **fields_of(dict(one.fields))} for one in answers], [])


def print_group(found: Described, *, with_prompt: bool) -> None:
    """Print the metadata of a group, a field on each line."""
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
        "made by": group["worker"],
        "put for step": units.number(group["put_step"]) if group["put_step"] is not None else None,
        "leased by": group["leased_by"],
        "trained at": None if group["trained_step"] is None else f"step {group['trained_step']}",
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
