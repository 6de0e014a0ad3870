"""The pages, by the names of their templates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.web.page_tables import Ask
from replaybuf.web.pages.group_pages import show_group, show_groups
from replaybuf.web.pages.run_pages import (
    show_checkpoints,
    show_events,
    show_overview,
    show_step,
    show_steps,
    show_workers,
)


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its path and title, and a function for the values of its template, which reads in one transaction."""

    path: str
    title: str
    show: Callable[[Transaction, Ask], dict[str, Any]]
    in_menu: bool = True


PAGES = {
    "overview": Page("/", "Overview", show_overview),
    "groups": Page("/groups", "Groups", show_groups),
    "group": Page("/groups/{uid}", "Group", show_group, in_menu=False),
    "steps": Page("/steps", "Steps", show_steps),
    "step": Page("/steps/{step}", "Step", show_step, in_menu=False),
    "checkpoints": Page("/checkpoints", "Checkpoints", show_checkpoints),
    "workers": Page("/workers", "Workers", show_workers),
    "events": Page("/events", "Events", show_events),
}
