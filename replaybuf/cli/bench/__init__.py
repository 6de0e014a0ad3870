"""The command `replaybuf bench` and its options: processes that put and take as workers and trainers do.

`run` checks the database, starts a process for each worker and trainer, which run the loops of `load`, collects what
they report, and cleans up. `report` makes figures and sentences of it.
"""

from __future__ import annotations

import sys
import uuid
from typing import Annotated

import typer

from replaybuf.cli.commands import TEXT, Out, Url, option
from replaybuf.cli.output import print_json
from replaybuf.common.redact import escape_line

#: Workers wait while there are so many groups.
MOST_GROUPS = 4096


def bench(
    url: Url,
    workers: Annotated[int, option("--workers", "Processes that put groups.", min=1, max=1024)] = 8,
    trainers: Annotated[int, option("--trainers", "Processes that take batches.", min=0, max=256)] = 1,
    group: Annotated[
        str, option("--group", "Rollouts in a group, and response tokens of each.", metavar="NxTOKENS")
    ] = "8x4000",
    minutes: Annotated[float, option("--minutes", "How long; 0.5 is half a minute.", min=0.001)] = 1.0,
    rate: Annotated[float, option("--rate", "Groups a second of each worker; 0: as fast as it can.", min=0)] = 0.0,
    take: Annotated[int, option("--take", "Groups in a batch.", min=1, max=MOST_GROUPS)] = 64,
    leases: Annotated[bool, option("--leases", "Lease batches and acknowledge them, instead of taking.")] = False,
    step_seconds: Annotated[float, option("--step-seconds", "How long a trainer trains on a batch.", min=0)] = 0.0,
    payloads: Annotated[
        str, option("--payloads", "Keep large payloads in this folder or object store.", metavar="PLACE")
    ] = "database",
    output: Out = TEXT,
) -> None:
    """Put load on a database: processes that put and take groups, as workers and trainers do.

    It says how many groups a second went in and out, how long puts and takes took (p50, p90, p99), and how long the
    processes waited for groups and for room. Every group is accounted for. It ends by itself, and removes what it has
    put, and a SQLite file that it has made, also after Ctrl-C. Workers wait while there are 4,096 groups. A database
    that holds groups of anybody else is refused.

    Exit status 1: errors, a process that died, or groups that were lost or doubled.

    \b
    Examples:
      replaybuf bench bench.db
      replaybuf bench postgresql://rl@db/bench --workers 64 --trainers 4
      replaybuf bench URL --rate 2 --group 16x8000 --leases --step-seconds 10
      replaybuf bench URL --format json > bench.json
    """
    from replaybuf.cli.bench.load import BenchSettings, parse_group
    from replaybuf.cli.bench.report import passed, print_results, results_of
    from replaybuf.cli.bench.run import PREFIX, run
    from replaybuf.storage.sql.inspection.writer import target_at

    rollouts, tokens = parse_group(group)
    settings = BenchSettings(
        url=target_at(url).url.render_as_string(hide_password=False),
        buffer=PREFIX + uuid.uuid4().hex[:8],
        workers=workers,
        trainers=trainers,
        rollouts=rollouts,
        tokens=tokens,
        seconds=minutes * 60,
        rate=rate,
        take=take,
        leases=leases,
        step_seconds=step_seconds,
        payloads=payloads,
    )
    results = results_of(run(settings, _tell))
    print_results(results) if output.for_people else print_json(results)
    if not passed(results):
        raise typer.Exit(1)


def _tell(line: str) -> None:
    """Print a line of progress on stderr, if that is a terminal."""
    if sys.stderr.isatty():
        typer.echo(escape_line(line), err=True)
