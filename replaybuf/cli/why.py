"""`replaybuf why`: explains the waits of trainers and producers, and timeouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from replaybuf.cli import commands
from replaybuf.cli.groups import trainer_text
from replaybuf.cli.output import print_line, print_table, write
from replaybuf.common import units
from replaybuf.common.redact import escape_line
from replaybuf.common.units import joined
from replaybuf.rules.query import query_of
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.values.rollouts.statuses import Status
from replaybuf.view.columns import LEASES, PROCESSES
from replaybuf.view.wait_reasons import (
    TASKS,
    DrawQuestion,
    Waits,
    expired_sentences,
    idle_sentence,
    read_waits,
    unequal_sentence,
)

_MOST_WAITS = 20
_MOST_WORKERS = 20

Task = Annotated[str | None, commands.argument("TASK", "Only waits for groups of this task.")]
Size = Annotated[int | None, commands.option("--size", "Ask for a draw of so many groups.", min=1)]
OfStatus = Annotated[
    str | None, commands.option("--status", "Ask for a draw of groups of this status.", metavar="STATUS")
]


def why(
    url: commands.Url,
    output: commands.Out = commands.TEXT,
    task: Task = None,
    buffer: commands.Buffer = None,
    size: Size = None,
    status: OfStatus = None,
    where: commands.Where = None,
) -> None:
    """Say why a trainer or a producer waits: the cause to remove in one sentence, the numbers below.

    Each cause has a line, with those who wait for it now. Where nobody waits, the line is about a draw of one group
    that somebody might do now; --size, --status and --where ask about another draw. Causes that may come next follow as
    "also".

    Below are the groups of each task, leases, workers, the limits in force, the last draw, and the last wait that timed
    out, which comes first while nothing was drawn since. Of workers of one name those that are alive are shown, or else
    the last one. A "silent" worker was killed, or sent no heartbeat for a minute (15 seconds of a wait): its counts are
    those of its last heartbeat. It is "replaced" once a later one does the same. A "fenced" one had the buffer open
    when another process restored it.

    With --format json all of it is there; csv has a row for each wait.

    \b
    Examples:
      replaybuf why run.db
      replaybuf why postgresql://rl@db/run7 math --size 64
      replaybuf why run.db math --where '{"reward": {"$gte": 0.9}}'
      replaybuf why run.db --format json | jq -r '.[].waits[].reason'
    """
    query_of(where, None, None)  # raises for an invalid query before the database is opened
    question = DrawQuestion(task, size or 1, commands.status_of(status) or Status.COMPLETED, where)
    asked = not (size is None and status is None and where is None)
    reader = open_reader(url)
    found = reader.read(lambda tx: read_waits(tx, buffer, question, asked=asked))
    if output.printed(lambda: [asdict(one) for one in found], lambda: [_row(one) for of in found for one in of.waits]):
        return
    several = len(found) > 1
    for number, one in enumerate(found):
        write(["\n"] if number else [])
        further, about_a_draw = _further(one), asked or task is not None
        if one.gave_up and not about_a_draw:
            print_line(further.pop())
        print_waits(one, several=several, about_a_draw=about_a_draw)
        if one.tasks:
            write(["\n"])
            print_table(one.tasks, [of for of in TASKS if of.name != "buffer"], one.now)
        print_processes(one)
        write(["\n"])
        for line in further:
            print_line(line)


def _row(wait: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in wait.items() if name not in ("limits", "facts")}


def print_waits(found: Waits, *, several: bool, about_a_draw: bool = False) -> bool:
    """Print a line for each wait, with lines below it for its other causes; return whether there is any."""
    of = f" of {found.buffer}" if several else ""
    sentence = None if about_a_draw else idle_sentence(found, several=several)
    if sentence is not None:
        print_line(sentence)
    alike: dict[str, list[dict[str, Any]]] = {}
    for one in found.waits:
        alike.setdefault(one["sentence"], []).append(one)
    shown = [waits[0] for waits in alike.values()]
    for one in shown[:_MOST_WAITS]:
        begins = _who(alike[one["sentence"]], found, of) if found.somebody_waits else f"If somebody drew now{of}"
        if found.somebody_waits or one is shown[0]:
            print_line(f"{begins}: {one['sentence']}")
        else:  # the next task of the same question
            print_line(one["sentence"], indent="  ")
        for fact in one["facts"]:
            if fact["reason"] is not None:
                print_line(f"also: {fact['text']}", indent="  ")
    if len(shown) > _MOST_WAITS:
        write([f"and {len(shown) - _MOST_WAITS:,} more\n"])
    return bool(sentence or shown)


def _who(alike: Sequence[dict[str, Any]], found: Waits, of: str) -> str:
    """List the processes that wait for one cause, with the age of the longest wait.

    As in `gen-0 (2 calls), gen-1 and gen-2 have waited for 12s`.
    """
    calls = Counter(one["worker"] or "somebody" for one in alike)
    who = joined([f"{name} ({count} calls)" if count > 1 else name for name, count in sorted(calls.items())])
    begun = min((one["since"] for one in alike if one["since"] is not None), default=None)
    several = len(calls) > 1
    if begun is None:
        return f"{who}{of} {'wait' if several else 'waits'}"
    waited = units.age((found.now - begun).total_seconds())
    return f"{who}{of} {'have' if several else 'has'} waited for {waited}"


def print_processes(found: Waits, *, several: bool = False) -> None:
    """Print who leases groups, and the workers; with the name of the buffer, if there are `several`."""
    newest = {one["name"]: one for one in reversed(found.workers)}
    workers = [one for one in found.workers if one["state"] == "alive" or one is newest[one["name"]]][:_MOST_WORKERS]
    hosts = {one["host"] for one in workers}
    title = f"{escape_line(found.buffer)}\n" if several else ""
    shown = [one for one in PROCESSES if len(hosts) > 1 or one.name != "host"]
    for rows, of_rows in ((found.leases, LEASES), (workers, shown)):
        if rows:
            write(["\n", title])
            print_table(rows, of_rows, found.now)
            title = ""
    if any(one["state"] == "silent" for one in workers):
        print_line("(what silent workers did is counted until their last heartbeat)")


def _further(found: Waits) -> list[str]:
    lines, known = [], {str(one["limits"]): one for one in found.waits if one["limits"] is not None}
    for one in known.values():
        whose = f" for {one['worker']}" if one["worker"] else ""
        shown = ", ".join(f"{name} {value}" for name, value in one["limits"].items())
        lines.append(f"limits in force{whose}: {shown or 'none'}")
    if not known:
        lines.append("limits in force: none that a worker has noted")
    if (unequal := unequal_sentence(found)) is not None:
        lines.append(unequal)
    if found.trainer is not None:
        lines.append(trainer_text(found.trainer))
    lines += expired_sentences(found)
    if last := found.last_draw:
        who = f" by {last['worker']}" if last["worker"] else ""
        ago = units.ago(last["time"], found.now)
        lines.append(f"last drawn: {units.number_of(last['groups'], 'group')}{who}, {ago}")
    if last := found.last_timeout:
        lines.append(f"last timeout: {last['worker']}, {units.ago(last['time'], found.now)}, {last['detail']}")
    return lines
