"""A progress bar on stderr for long operations, shown only where stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, *, counting: str = "") -> Iterator[Callable[[int, int], None]]:
    """Yield a function `tell(done, total)` that shows a bar, which disappears at the end of the block.

    While the total isn't known (0), the bar only counts what is done, named `counting`. `tell` may be called from any
    thread.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None, visible=False)

        def tell(done: int, total: int) -> None:
            name, shown = (what, done < total) if total else (counting, done > 0)
            progress.update(task, description=name, completed=done, total=total or None, visible=shown)

        yield tell
