"""From the options of `replaybuf demo` to a run, with its first and last lines of output."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from rich.console import Console

from replaybuf.demo.blas import use_one_thread
from replaybuf.demo.display import Display
from replaybuf.demo.folder import RunFolder
from replaybuf.demo.mode import Mode
from replaybuf.demo.summary import summary, where
from replaybuf.demo.trainer import Options, run
from replaybuf.errors import ConfigError
from replaybuf.storage.sql.engine.urls import is_memory, parse_url, url_or_path


def launch(
    url: str, run_dir: Path | None, *, mode: Mode, steps: int | None, workers: int, seed: int | None, fresh: bool
) -> bool:
    """Run the demo. Return False if Ctrl-C ended it. Raises ReplayBufError."""
    use_one_thread()
    url = url if url and "://" in url else f"sqlite:///{url_or_path(url).database}"
    options = Options(url, run_dir or default_folder(url), mode, steps, workers, seed, fresh)
    display, folder = Display(Console(highlight=False)), RunFolder(options.folder)
    display.say_parts(
        [f"Buffer: {where(url)}", f"weights: {options.folder}", f"mode: {mode}", f"trainer: pid {os.getpid()}"]
    )
    try:
        with folder.locked():
            training = asyncio.run(run(options, folder, display))
            for line in summary(url, options.folder, training.figures, training.saved.trained):
                display.say(line)
            if training.figures.step >= training.figures.target:
                folder.finish()
    except KeyboardInterrupt:
        display.say("Stopped. Run the same command again to go on from here.")
        return False
    return True


def default_folder(url: str) -> Path:
    """Return the run folder of a database: beside a SQLite file, in the current folder for PostgreSQL."""
    parsed = parse_url(url)
    if is_memory(parsed):
        raise ConfigError("the demo's processes can't share a database in memory: give a file, as in sqlite:///demo.db")
    if parsed.get_backend_name() == "sqlite":
        return Path(str(parsed.database)).with_suffix(".run")
    return Path(f"replaybuf-demo-{Path(str(parsed.database)).name}.run")
