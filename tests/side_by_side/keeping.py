"""Operations by which a buffer outlives what happens to it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from replaybuf import ReplayBuffer
from replaybuf.errors import SnapshotError
from tests.contract.harness import CODEC
from tests.reasons import because
from tests.reference.snapshots import plain_state, read_snapshot
from tests.side_by_side.pair import Pair


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
        self.same_state()

    @rule(how=st.sampled_from(["snapshot", "state", "reopen"]), crossed=st.booleans())
    def persist(self, how: str, crossed: bool) -> None:
        """Both go on from what they have left behind, or both from what the database has."""
        if how == "snapshot":
            self.save_and_resume(crossed)
        elif how == "state":
            self.carry_state(crossed)
        elif self.place.durable:
            self.runner.run(self.other.close())
            self.other = self.buffer(self.place.again(self.rules))
            for _, lease in self.leases:
                lease.storage, lease._putting = self.other.storage, self.other.putting

    def save_and_resume(self, crossed: bool) -> None:
        folders = [self.folder / "reference", self.folder / "other"]
        for buffer, folder in zip((self.reference, self.other), folders, strict=True):
            self.runner.run(buffer.save(folder))
            filled = self.reference.storage.state().groups or self.runner.run(buffer.checkpoints())
            with pytest.raises(SnapshotError, check=because("not empty")) if filled else nullcontext():
                self.runner.run(buffer.resume(folder))
        self.begin_anew()
        self.runner.run(self.reference.resume(folders[crossed]))
        self.runner.run(self.other.resume(folders[1]))

    def carry_state(self, crossed: bool) -> None:
        self.same_state()
        states = [buffer.state_dict() for buffer in (self.reference, self.other)]
        self.begin_anew()
        self.reference.load_state_dict(states[crossed])
        self.other.load_state_dict(states[1])

    def same_state(self) -> None:
        """What the database holds is what the model holds, next uids included."""
        expected = self.reference.storage.state()
        got = read_snapshot(self.other.state_dict()["snapshot"], CODEC)
        assert plain_state(got, payloads=False) == plain_state(expected, payloads=False)
        assert got.next_uid == expected.next_uid
