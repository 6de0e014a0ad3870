"""`replaybuf rm`: deleting groups."""

from __future__ import annotations

from typing import Annotated

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
from replaybuf.cli.options import YES, OfStatus, OfTask, Url, Where, listing, option
from replaybuf.cli.output import Output
from replaybuf.storage.sql.inspection.reader import open_reader


@listing
def rm(
    url: Url,
    output: Output,
    where: Where = None,
    task: OfTask = None,
    status: OfStatus = None,
    uid: Uids = None,
    everything: Everything = False,
    buffer: OneBuffer = None,
    dry_run: Annotated[bool, option("--dry-run", help="Only say what would be deleted.")] = False,
    yes: Annotated[bool, YES] = False,
) -> None:
    """Delete groups, as buffer.delete() does, after asking with their exact number.

    All the conditions have to hold; without any, --all is needed. Groups that are leased stay, and so do those that are
    put after the count. A run may go on meanwhile. What is deleted is gone, unless a checkpoint has it.

    \b
    Examples:
      replaybuf rm run.db --status expired --dry-run
      replaybuf rm run.db --task math --where '{"reward": 0}'
      replaybuf rm run.db --uid 17 --uid 23 --yes
    """
    conditions = Conditions(where, task, status, uid, everything, "this deletes all")
    choice = choose_groups(open_reader(url), buffer, conditions)
    show_choice(choice, output)
    found, deleted = choice.found, 0
    if found.groups and not dry_run:
        deleted = change(choice, "Delete", lambda storage, query: storage.delete(query), yes=yes)
        output.note(f"{groups(deleted)} deleted")
    if not output.for_people:
        counts = {"groups": found.groups, "leased": found.leased, "deleted": deleted}
        output.rows([{"url": choice.reader.where, "buffer": choice.buffer, **counts}], [])
    elif dry_run:
        output.note("nothing was deleted (--dry-run)")
