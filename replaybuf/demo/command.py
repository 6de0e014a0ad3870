"""The command `replaybuf demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replaybuf.demo.mode import Mode

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
            show_envvar=False,
            help="Training steps of the run; when it has done them, that many more.  [default: 200, or 60 seconds]",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            envvar="REPLAYBUF_MODE", show_envvar=False, help="Where and when rollouts are generated; see above."
        ),
    ] = Mode.DISAGGREGATED,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            max=32,
            metavar="N",
            envvar="REPLAYBUF_WORKERS",
            show_envvar=False,
            help="Processes that generate rollouts (mode disaggregated).",
        ),
    ] = 2,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            envvar="REPLAYBUF_SEED",
            show_envvar=False,
            help="Seed of the first weights and of the prompts.  [default: 0, or that of the run that goes on]",
            show_default=False,
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            envvar="REPLAYBUF_RUN_DIR",
            show_envvar=False,
            help="Folder of the weights.  [default: FILE.run beside the SQLite file, replaybuf-demo-DATABASE.run]",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", envvar="REPLAYBUF_FRESH", show_envvar=False, help="Remove the demo's weights and groups first."
        ),
    ] = False,
) -> None:
    """Train a small policy by GRPO through a replay buffer.

    Rollouts are answers to sums and differences, by an engine with a made-up speed, which takes long for some of them.
    The modes say where they are generated, and when:

    \b
      sync           in the trainer's process, just the groups of the next step
      async          in the trainer's process, more than that at the same time; the
                     slowest are interrupted when the batch is there, and continued
      disaggregated  in processes of their own, while the trainer trains, with
                     weights that lag behind

    Kill any of the processes with kill -9 and run the same command again: it goes on from the weights saved last, with
    the buffer as it was then, and in the end each prompt was trained once.

    \b
    Examples:
      replaybuf demo
      replaybuf demo --mode async
      replaybuf demo --url postgresql://user@host/database --steps 500 --workers 4
      replaybuf demo --url sqlite:///demo.db --seed 1 --fresh
    """
    from replaybuf.demo.launch import launch

    if not launch(url, run_dir, mode=mode, steps=steps, workers=workers, seed=seed, fresh=fresh):
        raise typer.Exit(_INTERRUPTED)
