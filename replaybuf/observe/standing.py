"""How far a run has come, by its cursors. Light: `replaybuf stats` imports it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from replaybuf.errors import InputError

if TYPE_CHECKING:
    from replaybuf.storage.values import Cursor


def standing(cursors: Sequence[Cursor]) -> dict[str, Any]:
    """Return how many prompts were drawn from each dataset, and the state that the trainer has published."""
    if not cursors:  # saves the import
        return {"prompts": {}, "trainer": None}
    from replaybuf.files.importing import IMPORT
    from replaybuf.rules.train_state import TRAINER, TrainState

    by_name = {one.name: one for one in cursors if not one.name.startswith(IMPORT)}
    published = by_name.pop(TRAINER, None)
    trainer = None
    if published is not None:
        with suppress(InputError):  # of another version: show the rest without it
            trainer = asdict(TrainState.decode(published.value))
    return {"prompts": {name: one.position for name, one in sorted(by_name.items())}, "trainer": trainer}
