"""The command `replaybuf demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_URL = "sqlite:///replaybuf-demo.db"
_INTERRUPTED = 128 + 2


def demo(
    url: Annotated[
        str,
        typer.Option(
            envvar="REPLAYBUF_URL",
            metavar="URL",
            help="sqlite:///FILE, postgresql://user@host/database, or the path of a SQLite file, which is created.",
        ),
    ] = DEFAULT_URL,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            envvar="REPLAYBUF_STEPS",
            help="Training steps of the run; when it has done them, that many more.  [default: 200, or 45 seconds]",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(min=1, max=32, metavar="N", envvar="REPLAYBUF_WORKERS", help="Processes that generate rollouts."),
    ] = 2,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            envvar="REPLAYBUF_SEED",
            help="Seed of the first weights and of the prompts.  [default: 0, or that of the run that goes on]",
            show_default=False,
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            envvar="REPLAYBUF_RUN_DIR",
            help="Folder of the weights.  [default: FILE.run beside the SQLite file, replaybuf-demo-DATABASE.run]",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", envvar="REPLAYBUF_FRESH", help="Remove the demo's weights and groups first.")
    ] = False,
) -> None:
    """Train a small policy by asynchronous GRPO through a replay buffer.

    Rollout workers, processes of their own with weights that lag behind, sample answers to sums and differences and put
    them into the buffer; the trainer takes them, most stale first. Kill any of the processes with kill -9 and run the
    same command again: it goes on from the weights saved last and from the buffer.

    \b
    Examples:
      replaybuf demo
      replaybuf demo --url postgresql://user@host/database --steps 500 --workers 4
      replaybuf demo --url sqlite:///demo.db --seed 1 --fresh
    """
    from replaybuf.demo.launch import launch

    if not launch(url, run_dir, steps=steps, workers=workers, seed=seed, fresh=fresh):
        raise typer.Exit(_INTERRUPTED)
