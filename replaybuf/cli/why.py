"""`replaybuf why`: explains the waits of trainers and producers, and timeouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

from replaybuf.cli import commands
from replaybuf.cli.groups import trainer_text
from replaybuf.cli.output import print_json, print_line, print_table, write
from replaybuf.common import units
from replaybuf.common.redact import escape_line
from replaybuf.common.units import joined
from replaybuf.rules.query import query_of
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.values.rollouts.statuses import Status
from replaybuf.view.columns import LEASES, PROCESSES, TASKS
from replaybuf.view.wait_reasons import DrawQuestion, Waits, idle_sentence, read_waits

_MOST_WORKERS = 20

Task = Annotated[str | None, commands.argument("TASK", "Only waits for groups of this task.")]
Size = Annotated[int | None, commands.option("--size", "Ask for a draw of so many groups.", min=1)]


def why(
    url: commands.Url,
    output: commands.Out = commands.TEXT,
    task: Task = None,
    buffer: commands.Buffer = None,
    size: Size = None,
    where: commands.Where = None,
) -> None:
    """Say why a trainer or a producer waits: the cause to remove in one sentence, the numbers below.

    Each cause has a line, with those who wait for it now. Where nobody waits, the line is about a draw of one group
    that somebody might do now; --size and --where ask about another draw. Causes that may come next follow as "also".

    Below are the groups of each task, leases, workers, the limits in force, the last draw, and the last wait that timed
    out. Of workers of one name those that are alive are shown, or else the last one. A "silent" worker was killed, or
    sent no heartbeat for a minute (15 seconds of a wait): its counts are those of its last heartbeat. A "fenced" one
    had the buffer open when another process restored it.

    With --format json all of it is there.

    \b
    Examples:
      replaybuf why run.db
      replaybuf why postgresql://rl@db/run7 math --size 64
      replaybuf why run.db math --where '{"reward": {"$gte": 0.9}}'
      replaybuf why run.db --format json | jq -r '.[].waits[].reason'
    """
    query_of(where, None, None)  # raises for an invalid query before the database is opened
    question = DrawQuestion(task, size or 1, Status.COMPLETED, where)
    asked = not (size is None and where is None)
    reader = open_reader(url)
    rows = reader.read(lambda tx: read_waits(tx, buffer, question, asked=asked))
    if not output.for_people:
        print_json([asdict(row) for row in rows])
        return
    several = len(rows) > 1
    for number, row in enumerate(rows):
        write(["\n"] if number else [])
        print_waits(row, several=several, about_a_draw=asked or task is not None)
        if row.tasks:
            write(["\n"])
            print_table(row.tasks, [column for column in TASKS if column.name != "buffer"], row.now)
        print_processes(row)
        write(["\n"])
        for line in _further_notes(row):
            print_line(line)


def print_waits(waits: Waits, *, several: bool, about_a_draw: bool = False) -> bool:
    """Print a line for each wait, with lines below it for its other causes; return whether there is any."""
    scope = f" of {waits.buffer}" if several else ""
    sentence = None if about_a_draw else idle_sentence(waits, several=several)
    if sentence is not None:
        print_line(sentence)
    queues: dict[str, list[dict[str, Any]]] = {}
    for wait in waits.waits:
        queues.setdefault(wait["sentence"], []).append(wait)
    causes = [queue[0] for queue in queues.values()]
    for wait in causes:
        lead = _lead(queues[wait["sentence"]], waits, scope) if waits.somebody_waits else f"If somebody drew now{scope}"
        print_line(f"{lead}: {wait['sentence']}")
        for fact in wait["facts"]:
            if fact["reason"] is not None:
                print_line(f"also: {fact['text']}", indent="  ")
    return bool(sentence or causes)


def _lead(queue: Sequence[dict[str, Any]], waits: Waits, scope: str) -> str:
    """List the processes that wait for one cause, with the age of the longest wait.

    As in `gen-0 (2 calls), gen-1 and gen-2 have waited for 12s`.
    """
    calls = Counter(wait["worker"] or "somebody" for wait in queue)
    processes = joined([f"{name} ({count} calls)" if count > 1 else name for name, count in sorted(calls.items())])
    start = min((wait["since"] for wait in queue if wait["since"] is not None), default=None)
    several = len(calls) > 1
    if start is None:
        return f"{processes}{scope} {'wait' if several else 'waits'}"
    age = units.age((waits.now - start).total_seconds())
    return f"{processes}{scope} {'have' if several else 'has'} waited for {age}"


def print_processes(waits: Waits, *, several: bool = False) -> None:
    """Print who leases groups, and the workers; with the name of the buffer, if there are `several`."""
    newest = {worker["name"]: worker for worker in reversed(waits.workers)}
    workers = [row for row in waits.workers if row["state"] == "alive" or row is newest[row["name"]]][:_MOST_WORKERS]
    hosts = {worker["host"] for worker in workers}
    title = f"{escape_line(waits.buffer)}\n" if several else ""
    process_columns = [column for column in PROCESSES if len(hosts) > 1 or column.name != "host"]
    for rows, columns in ((waits.leases, LEASES), (workers, process_columns)):
        if rows:
            write(["\n", title])
            print_table(rows, columns, waits.now)
            title = ""
    if any(worker["state"] == "silent" for worker in workers):
        print_line("(what silent workers did is counted until their last heartbeat)")


def _further_notes(waits: Waits) -> list[str]:
    lines, limits = [], {str(wait["limits"]): wait for wait in waits.waits if wait["limits"] is not None}
    for wait in limits.values():
        owner = f" for {wait['worker']}" if wait["worker"] else ""
        values = ", ".join(f"{name} {value}" for name, value in wait["limits"].items())
        lines.append(f"limits in force{owner}: {values or 'none'}")
    if not limits:
        lines.append("limits in force: none that a worker has noted")
    if waits.trainer is not None:
        lines.append(trainer_text(waits.trainer))
    if draw := waits.last_draw:
        consumer = f" by {draw['worker']}" if draw["worker"] else ""
        age = units.ago(draw["time"], waits.now)
        lines.append(f"last drawn: {units.number_of(draw['groups'], 'group')}{consumer}, {age}")
    if timeout := waits.last_timeout:
        lines.append(f"last timeout: {timeout['worker']}, {units.ago(timeout['time'], waits.now)}, {timeout['detail']}")
    return lines
