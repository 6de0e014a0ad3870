"""`replaybuf doctor` checks, repairs and upgrades a database; `replaybuf bench` puts load on one."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from replaybuf.cli.app import TEXT, Out, Url, option
from replaybuf.cli.output import Output, print_json, print_labelled
from replaybuf.common.progress import progress_bar
from replaybuf.common.redact import escape_line
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.view.columns import Column

if TYPE_CHECKING:
    from replaybuf.cli.doctor import CheckContext, Finding


_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_INDENT = 26


def doctor(
    url: Url,
    output: Out = TEXT,
    quick: Annotated[
        bool, option("--quick", "Read a sample of the payloads only, and leave out what takes long.")
    ] = False,
    repair: Annotated[bool, option("--repair", "Mend what is safe to mend, also while a run goes on.")] = False,
    probe: Annotated[
        bool, option("--probe", "Also make each call once in a buffer of its own, which is removed afterwards.")
    ] = False,
    upgrade: Annotated[
        bool, option("--upgrade", "Bring the schema up to date, or create the tables, and check nothing.")
    ] = False,
    take_over: Annotated[
        bool, option("--take-over", "Make places for payloads this copy's: nobody may use the original any more.")
    ] = False,
) -> None:
    """Check a database: schema, integrity, orphans, checksums, counts, places of payloads, disk, access.

    A line for each check says what is fine, or what is wrong and how to mend it. The exit code is 0 when there are no
    problems (warnings are none), and 1 when some are left. All payloads are read, unless --quick is given; nobody has
    to wait for that.

    --repair mends what is safe to mend, and says what it did: payloads that nobody needs are deleted, groups whose
    payloads are damaged are set aside as failed with the reason, counts and the counter of uids are corrected, missing
    indexes and views are made, files of payloads that nothing names are deleted, a lost replaybuf.json is written anew.
    It never deletes a group.

    --probe tells whether a server has all that a run needs, and names the first call that fails. It makes the tables if
    they don't exist, as the first run would.

    --upgrade happens in one transaction, whole or not at all. Close all users of the database first.

    --take-over is for a copy of a database that is used in place of the original, such as one that was moved to another
    host: until then it reads payloads in the original's folder or object store, and neither writes nor deletes there.

    \b
    Examples:
      replaybuf doctor run.db
      replaybuf doctor postgresql://rl@db/run7 --repair
      replaybuf doctor postgresql://rl@db/run7 --probe
      replaybuf doctor postgresql://admin@db/run7 --upgrade
    """
    from replaybuf.cli.doctor import Severity

    reader = open_reader(url)
    if upgrade:
        _upgrade(reader, output)
        return
    if take_over:
        from replaybuf.cli.doctor.check_places import take_over_places

        for line in take_over_places(reader) or ["all places of this database are its own"]:
            output.note(f"take-over: {line}")
    rows = []
    for finding in _examined(reader, output, quick=quick, mend=repair, trial=probe):
        rows.append({**asdict(finding), "level": str(finding.level), "mend": finding.mend or None})
        if output.for_people:
            print_finding(finding)
    if not output.for_people:
        output.rows(rows, [])
    if any(row["level"] == Severity.PROBLEM for row in rows):
        raise typer.Exit(1)


def _examined(reader: Reader, output: Output, *, quick: bool, mend: bool, trial: bool) -> Iterator[Finding]:
    """Yield the findings; with `mend`, the remaining ones after the repair; those of a trial last."""
    from replaybuf.cli.doctor import CheckContext
    from replaybuf.cli.doctor.examine import examine

    with progress_bar("payloads") as bar:
        context = CheckContext(reader.where, path=reader.path, quick=quick, tell=bar)
        yield from _repaired(reader, output, context) if mend else examine(reader, context)
    if trial:
        from replaybuf.cli.doctor.probe import probe

        yield from probe(reader)


def _repaired(reader: Reader, output: Output, context: CheckContext) -> Sequence[Finding]:
    """Repair what can be repaired, and return the remaining findings."""
    from replaybuf.cli.doctor import CheckContext, Severity
    from replaybuf.cli.doctor.examine import examine, repair

    found = list(examine(reader, context))
    if any(finding.repairable and finding.level != Severity.OK for finding in found):
        for line in repair(reader, context):
            output.note(f"repair: {line}")
        again = CheckContext(context.where, path=context.path, quick=context.quick, tell=context.tell)
        return list(examine(reader, again))
    if any(finding.level == Severity.PROBLEM for finding in found):
        output.note("nothing of this can be repaired; see below what to do")
    else:
        output.note("there was nothing to repair")
    return found


def print_finding(finding: Finding) -> None:
    """Print a finding, and its remedy below."""
    print_labelled(f"{finding.level!s:<7}  {finding.check:<15}  ", finding.text, label_style=_STYLES[finding.level])
    if finding.mend:
        print_labelled(" " * _INDENT, f"-> {finding.mend}", style="dim")


def _upgrade(reader: Reader, output: Output) -> None:
    from replaybuf.storage.sql.inspection.writer import upgrade_database

    before, after = upgrade_database(reader)
    row = {"url": reader.where, "before": before, "after": after}
    output.rows([row], [Column(name, name, "word") for name in ("before", "after")])
    if before == after:
        output.note("it was up to date already")


def bench(
    url: Url,
    workers: Annotated[int, option("--workers", "Processes that put groups.", min=1, max=1024)] = 8,
    trainers: Annotated[int, option("--trainers", "Processes that take batches.", min=0, max=256)] = 1,
    group: Annotated[
        str, option("--group", "Rollouts in a group, and response tokens of each.", metavar="NxTOKENS")
    ] = "8x4000",
    minutes: Annotated[float, option("--minutes", "How long; 0.5 is half a minute.", metavar="N")] = 1.0,
    groups: Annotated[int, option("--groups", "Groups of each worker, then it ends; 0: any number.", min=0)] = 0,
    rate: Annotated[float, option("--rate", "Groups a second of each worker; 0: as fast as it can.", min=0)] = 0.0,
    take: Annotated[int, option("--take", "Groups in a batch.", min=1)] = 64,
    leases: Annotated[bool, option("--leases", "Lease batches and acknowledge them, instead of taking.")] = False,
    step_seconds: Annotated[float, option("--step-seconds", "How long a trainer trains on a batch.", min=0)] = 0.0,
    most: Annotated[int, option("--most", "Workers pause while there are more groups; 0: never.", min=0)] = 4096,
    payloads: Annotated[
        str, option("--payloads", "Keep large payloads in this folder or object store.", metavar="PLACE")
    ] = "database",
    keep: Annotated[bool, option("--keep", "Leave the groups and the buffer behind.")] = False,
    output: Out = TEXT,
) -> None:
    """Put load on a database: processes that put and take groups, as workers and trainers do.

    It says how many groups a second went in and out, how long puts and takes took (p50, p90, p99), what the processes
    waited for, and what was the limit. Every group is accounted for. It ends by itself, and removes what it has put. A
    database that holds groups of anybody else is refused.

    Ctrl-C ends it early. Exit status 1: errors, a process that died, or groups that were lost or doubled.

    \b
    Examples:
      replaybuf bench bench.db
      replaybuf bench postgresql://trainer@db.cluster/bench --workers 64 --trainers 4 --minutes 5
      replaybuf bench URL --workers 64 --rate 2 --group 16x8000 --leases --step-seconds 10
      replaybuf bench URL --format json > bench.json
    """
    from replaybuf.cli.bench.load import BenchSettings, parse_group
    from replaybuf.cli.bench.report import passed, print_results, results_of
    from replaybuf.cli.bench.run import PREFIX, run

    rollouts, tokens = parse_group(group)
    settings = BenchSettings(
        url=url if "://" in url else f"sqlite:///{url}",
        buffer=PREFIX + uuid.uuid4().hex[:8],
        workers=workers,
        trainers=trainers,
        rollouts=rollouts,
        tokens=tokens,
        seconds=minutes * 60,
        groups=groups,
        rate=rate,
        take=take,
        leases=leases,
        step_seconds=step_seconds,
        most=most,
        payloads=payloads,
        keep=keep,
    )
    outcome = run(settings, _tell)
    results = results_of(outcome)
    if output.for_people:
        print_results(results)
    else:
        print_json(results)
    if outcome.signalled:
        raise typer.Exit(128 + outcome.signalled)
    if not passed(results):
        raise typer.Exit(1)


def _tell(line: str) -> None:
    """Print a line of progress on stderr, if that is a terminal."""
    if sys.stderr.isatty():
        typer.echo(escape_line(line), err=True)
