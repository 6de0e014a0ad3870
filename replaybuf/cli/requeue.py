"""`replaybuf requeue`: bringing back groups that were set aside."""

from __future__ import annotations

from typing import Annotated

import typer

from replaybuf.cli.choosing import (
    Conditions,
    Everything,
    OneBuffer,
    Uids,
    change,
    choose_groups,
    groups,
    show_choice,
)
from replaybuf.cli.options import YES, OfTask, Url, Where, listing, option
from replaybuf.cli.output import Output
from replaybuf.storage.sql.inspection.reader import open_reader

_STATUSES = ("failed", "filtered", "expired")


@listing
def requeue(
    url: Url,
    output: Output,
    where: Where = None,
    task: OfTask = None,
    status: Annotated[
        str | None, option("--status", metavar="STATUS", help="Only groups that are failed, filtered or expired.")
    ] = None,
    uid: Uids = None,
    everything: Everything = False,
    buffer: OneBuffer = None,
    dry_run: Annotated[bool, option("--dry-run", help="Only say what would come back.")] = False,
    yes: Annotated[bool, YES] = False,
) -> None:
    """Bring back groups that are failed, filtered or expired, after asking with their exact number.

    Groups whose rollouts are all completed, such as filtered ones and those that were delivered too often, can be drawn
    again. The others become aborted, and producers generate them again: those that a worker put as failed, and expired
    ones, whose responses are gone. Errors and failed deliveries are forgotten. Each requeue is an event.

    All the conditions have to hold; without any, --all is needed. A run may go on meanwhile.

    \b
    Examples:
      replaybuf requeue run.db --status failed --dry-run
      replaybuf requeue run.db --status filtered --where '{"reward": {"$gte": 0.5}}'
      replaybuf requeue run.db --uid 17 --uid 23 --yes
    """
    if status is not None and status not in _STATUSES:
        raise typer.BadParameter(f"{status!r:.100} is none of {', '.join(_STATUSES)}.", param_hint="--status")
    conditions = Conditions(where, task, status, uid, everything, "all of them come back")
    choice = choose_groups(open_reader(url), buffer, conditions, _STATUSES)
    show_choice(choice, output)
    found, back = choice.found, dict[str, int]()
    if found.groups and not dry_run:
        moved = change(choice, "Requeue", lambda storage, query: storage.requeue(query), yes=yes)
        back = {str(name): number for name, number in moved.items()}
        output.note(
            "; ".join(f"{groups(number)} now {name}" for name, number in sorted(back.items())) or "none is left"
        )
    if not output.for_people:
        counts = {"groups": found.groups, "leased": found.leased, "completed": 0, "aborted": 0, **back}
        output.rows([{"url": choice.reader.where, "buffer": choice.buffer, **counts}], [])
    elif dry_run:
        output.note("nothing was changed (--dry-run)")
