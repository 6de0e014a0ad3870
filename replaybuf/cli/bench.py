"""`replaybuf bench`: puts load on a database and reports throughput and latencies."""

from __future__ import annotations

import sys
import uuid
from typing import Annotated

import typer

from replaybuf.cli.app import TEXT, Out, Url, option, read_size
from replaybuf.cli.output import print_json
from replaybuf.redact import escape_line


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
    concurrency: Annotated[int, option("--concurrency", "Puts of a worker at once.", min=1, max=1024)] = 1,
    take: Annotated[int, option("--take", "Groups in a batch.", min=1)] = 64,
    leases: Annotated[bool, option("--leases", "Lease batches and acknowledge them, instead of taking.")] = False,
    step_seconds: Annotated[float, option("--step-seconds", "How long a trainer trains on a batch.", min=0)] = 0.0,
    most: Annotated[int, option("--most", "Workers pause while there are more groups; 0: never.", min=0)] = 4096,
    extra: Annotated[
        str | None, option("--extra", "One more array in each group: 20M for pictures, experts.", metavar="SIZE")
    ] = None,
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
    from replaybuf.bench.load import BenchSettings, parse_group
    from replaybuf.bench.report import passed, results_of, text_of
    from replaybuf.bench.run import PREFIX, run

    rollouts, tokens = parse_group(group)
    settings = BenchSettings(
        url=url if "://" in url else f"sqlite:///{url}",
        buffer=PREFIX + uuid.uuid4().hex[:8],
        workers=workers,
        trainers=trainers,
        rollouts=rollouts,
        tokens=tokens,
        extra=0 if extra is None else read_size(extra, "--extra"),
        seconds=minutes * 60,
        groups=groups,
        rate=rate,
        concurrency=concurrency,
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
        typer.echo(text_of(results), nl=False)
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
