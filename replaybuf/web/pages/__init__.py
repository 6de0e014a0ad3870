"""The pages. Each has a function that reads its data in one transaction; `/api/NAME.json` returns the data as JSON.

The data includes the time of the transaction (`now`). `draw` adds parts for the HTML only, such as plots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction
from replaybuf.web.ask import Ask
from replaybuf.web.pages.groups import draw_group, draw_groups, read_group, read_groups
from replaybuf.web.pages.overview import (
    draw_checkpoints,
    draw_events,
    draw_overview,
    read_checkpoints,
    read_events,
    read_overview,
)
from replaybuf.web.pages.sql import draw_statement, rows_of_statement, run_typed
from replaybuf.web.pages.steps import (
    draw_batch,
    draw_step,
    draw_steps,
    draw_worker,
    draw_workers,
    groups_of_step,
    read_batch,
    read_step,
    read_steps,
    read_worker,
    read_workers,
)

Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """A page: path and title, `read` for its data, and `draw` for its plots. `PAGES` has it by its template's name.

    `rows` finds the rows of its table in the data, for CSV. Instead of `read`, `run` runs a statement in a transaction
    of its own, with limits in seconds and rows. A page that `compares` gets another run's train steps.
    """

    path: str
    title: str
    read: Callable[[ReadTransaction, Ask], Data] | None
    draw: Callable[[Data, Ask], Mapping[str, Any]]
    in_menu: bool = True
    rows: Callable[[Data], Sequence[Any]] | None = None
    run: Callable[[Reader, Ask, float, int], Data] | None = None
    compares: bool = False


PAGES = {
    "overview": Page("/", "Overview", read_overview, draw_overview, rows=itemgetter("tasks")),
    "groups": Page("/groups", "Groups", read_groups, draw_groups, rows=itemgetter("rows")),
    "group": Page("/groups/{uid}", "Group", read_group, draw_group, in_menu=False),
    "steps": Page("/steps", "Steps", read_steps, draw_steps, rows=itemgetter("steps"), compares=True),
    "step": Page("/steps/{step}", "Step", read_step, draw_step, in_menu=False, rows=groups_of_step),
    "batch": Page("/batches/{batch}", "Draw", read_batch, draw_batch, in_menu=False, rows=itemgetter("groups")),
    "checkpoints": Page("/checkpoints", "Checkpoints", read_checkpoints, draw_checkpoints, rows=itemgetter("rows")),
    "workers": Page("/workers", "Workers", read_workers, draw_workers, rows=itemgetter("workers")),
    "worker": Page("/worker", "Worker", read_worker, draw_worker, in_menu=False),
    "events": Page("/events", "Events", read_events, draw_events, rows=itemgetter("rows")),
    "sql": Page("/sql", "SQL", None, draw_statement, rows=rows_of_statement, run=run_typed),
}
