"""Operations by which a buffer outlives what happens to it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from replaybuf import ReplayBuffer
from replaybuf.errors import SnapshotError
from tests.reasons import because
from tests.side_by_side.pair import Pair
from tests.side_by_side.seen import without_payloads


class Keeping(Pair):
    """Checkpoints, snapshots, state dicts, and opening again."""

    @rule(
        step=st.integers(0, 2),
        how=st.sampled_from(["checkpoint", "checkpoint", "restore", "restore", "keep new", "drop"]),
    )
    def keep_or_restore(self, step: int, how: str) -> None:
        async def operation(buffer: ReplayBuffer) -> Any:
            if how == "checkpoint":
                made = await buffer.checkpoint(step)
                return made.step, made.groups
            if how == "drop":
                return await buffer.drop_checkpoint(step)
            made = await buffer.restore(step, keep_new=how == "keep new")
            return made.step, made.groups, [one.step for one in await buffer.checkpoints()]

        self.both(operation)
        states = [without_payloads(buffer.state_dict()) for buffer in (self.reference, self.other)]
        assert states[0] == states[1]

    @rule(how=st.sampled_from(["snapshot", "state", "reopen"]), crossed=st.booleans())
    def persist(self, how: str, crossed: bool) -> None:
        """Both go on from what they, or the other one, have left behind."""
        if how == "snapshot":
            self.save_and_resume(crossed)
        elif how == "state":
            self.carry_state(crossed)
        elif self.place.durable:
            self.runner.run(self.other.close())
            self.other = self.buffer(self.place.again(self.rules))
            for _, lease in self.leases:
                lease._storage, lease._putting = self.other.storage, self.other.putting

    def save_and_resume(self, crossed: bool) -> None:
        folders = [self.folder / "reference", self.folder / "other"]
        for buffer, folder in zip((self.reference, self.other), folders, strict=True):
            self.runner.run(buffer.save(folder))
            filled = buffer.state_dict()["storage"]["groups"] or self.runner.run(buffer.checkpoints())
            with pytest.raises(SnapshotError, check=because("not empty")) if filled else nullcontext():
                self.runner.run(buffer.resume(folder))
        self.begin_anew()
        for buffer, folder in zip((self.reference, self.other), reversed(folders) if crossed else folders, strict=True):
            self.runner.run(buffer.resume(folder))

    def carry_state(self, crossed: bool) -> None:
        states = [buffer.state_dict() for buffer in (self.reference, self.other)]
        assert without_payloads(states[0]) == without_payloads(states[1])
        self.begin_anew()
        for buffer, state in zip((self.reference, self.other), reversed(states) if crossed else states, strict=True):
            buffer.load_state_dict(state)
