"""The command `replaybuf demo`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from replaybuf.demo import Mode

IN_DATABASE = "database"  # as in `replaybuf.places.owners`, which takes its time to import

_INTERRUPTED = 128 + 2
_URL_HELP = "sqlite:///FILE (or its path, which is created), postgresql://...: empty, or the demo's own."
_STEPS_HELP = "Training steps of the run; when it has done them, that many more.  [default: 200, or 60 seconds]"
_WORKERS_HELP = "Processes that generate rollouts (mode disaggregated)."
_SEED_HELP = "Seed of the prompts and of the answers.  [default: 0, or that of the run that goes on]"
_RUN_DIR_HELP = "Folder of the weights.  [default: FILE.run beside the SQLite file, replaybuf-demo-DATABASE.run]"
_PAYLOADS_HELP = "Give each token an array, and keep these apart: in a folder, which is created, or s3://bucket/prefix."


def demo(  # options without variables: those of a run aren't for the demo
    url: Annotated[str, Option("--url", help=_URL_HELP, metavar="URL")] = "sqlite:///replaybuf-demo.db",
    steps: Annotated[int | None, Option("--steps", help=_STEPS_HELP, min=1, metavar="N", show_default=False)] = None,
    mode: Annotated[
        Mode, Option("--mode", help="Where and when rollouts are generated; see above.")
    ] = Mode.DISAGGREGATED,
    workers: Annotated[int, Option("--workers", help=_WORKERS_HELP, min=1, max=32, metavar="N")] = 2,
    seed: Annotated[int | None, Option("--seed", help=_SEED_HELP, min=0, metavar="N", show_default=False)] = None,
    run_dir: Annotated[
        Path | None, Option("--run-dir", help=_RUN_DIR_HELP, metavar="FOLDER", show_default=False)
    ] = None,
    payloads: Annotated[str, Option("--payloads", help=_PAYLOADS_HELP, metavar="PLACE")] = IN_DATABASE,
    fresh: Annotated[bool, Option("--fresh", help="Remove the demo's own weights and groups first.")] = False,
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
      replaybuf demo --payloads arrays
    """
    # Read at the import of numpy, in workers too: the demo's arrays are small, and BLAS threads, which spin while they
    # wait for each other, would take the cores from the other processes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from replaybuf.demo.trainer import launch

    if not launch(url, run_dir, mode=mode, steps=steps, workers=workers, seed=seed, fresh=fresh, payloads=payloads):
        raise typer.Exit(_INTERRUPTED)
