"""The pages: what each reads in one transaction, and what it draws of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.web.ask import Ask
from replaybuf.web.pages.groups import draw_group, draw_groups, read_group, read_groups
from replaybuf.web.pages.overview import (
    draw_checkpoints,
    draw_events,
    draw_overview,
    read_checkpoints,
    read_events_page,
    read_overview,
)
from replaybuf.web.pages.steps import (
    draw_step,
    draw_steps,
    draw_worker,
    draw_workers,
    read_step_page,
    read_steps_page,
    read_worker_page,
    read_workers,
)

Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """A page: path and title, `read` for its data, and `draw` for what is made of them, such as plots.

    `PAGES` has it by its template's name.
    """

    path: str
    title: str
    read: Callable[[ReadTransaction, Ask], Data]
    draw: Callable[[Data, Ask], Mapping[str, Any]]
    in_menu: bool = True


PAGES = {
    "overview": Page("/", "Overview", read_overview, draw_overview),
    "groups": Page("/groups", "Groups", read_groups, draw_groups),
    "group": Page("/groups/{uid}", "Group", read_group, draw_group, in_menu=False),
    "steps": Page("/steps", "Steps", read_steps_page, draw_steps),
    "step": Page("/steps/{step}", "Step", read_step_page, draw_step, in_menu=False),
    "checkpoints": Page("/checkpoints", "Checkpoints", read_checkpoints, draw_checkpoints),
    "workers": Page("/workers", "Workers", read_workers, draw_workers),
    "worker": Page("/worker", "Worker", read_worker_page, draw_worker, in_menu=False),
    "events": Page("/events", "Events", read_events_page, draw_events),
}
