"""Handles that are loaded together: in their order, each once, in rollouts of every class."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

from replaybuf import Status, load_into
from replaybuf.errors import InputError
from replaybuf.storage.places.folder import FolderStore
from replaybuf.storage.sql.tasks.handles import ArrayHandle, load_all
from tests.places.deferred import PLACES, Kept, experts, kept_at, lent, rollout, same
from tests.stores import TASK


async def test_load_all_keeps_the_order_over_groups_places_and_databases(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    found: list[ArrayHandle] = []
    async with AsyncExitStack() as stack:
        for place in PLACES[:-1]:
            (tmp_path / place).mkdir()
            buffer = await stack.enter_async_context(kept_at(place, request, tmp_path / place).opened())
            number = len(found)
            await buffer.put([rollout(number), rollout(number + 1)], TASK)
            await buffer.put([rollout(number + 2)], TASK)
            lease, _ = await lent(buffer, 2)
            found += [one.routed_experts for item in lease.items[TASK] for one in item.item]
        order = [*range(0, len(found), 2), *range(1, len(found), 2), 0]
        loaded = load_all(found[place] for place in order)
    assert all(same(one, experts(place)) for place, one in zip(order, loaded, strict=True))
    assert loaded[0] is not loaded[-1]


async def test_what_is_no_handle(in_file: Kept) -> None:
    with pytest.raises(InputError, match="must be ArrayHandles, got ndarray"):
        load_all([experts()])  # type: ignore[list-item]
    with pytest.raises(InputError, match="timeout"):
        load_all([], timeout=-1)
    assert load_all([]) == []


async def test_load_into_loads_each_handle_once_and_in_one_request(
    in_folder: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_folder.opened() as buffer:
        for number in range(5):
            await buffer.put([rollout(number)], TASK)
        lease, found = await lent(buffer, 5)
        calls: list[int] = []
        original = FolderStore.read
        monkeypatch.setattr(
            FolderStore, "read", lambda store, ranges, t: (calls.append(len(ranges)), original(store, ranges, t))[1]
        )
        found[0].extra_fields["again"] = found[0].routed_experts
        load_into([*lease.items[TASK], found])
        assert calls == [5]
        assert found[0].extra_fields["again"] is found[0].routed_experts
        assert all(same(one.routed_experts, experts(number)) for number, one in enumerate(found))


async def test_small_arrays_of_one_field_are_read_together_and_come_apart(
    in_folder: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = [rollout(number) for number in range(3)]
    for number, one in enumerate(group):
        one.extra_fields = {"small": np.arange(200 + number)}
    async with in_folder.opened() as buffer:
        await buffer.put(group, TASK)
        lease, _ = await lent(buffer, 1, deferred=("extra_fields", "routed_experts"))
        [item] = lease.items[TASK]
        sizes: list[int] = []
        original = FolderStore.read
        monkeypatch.setattr(
            FolderStore, "read", lambda store, ranges, t: (sizes.append(len(ranges)), original(store, ranges, t))[1]
        )
        loaded = load_all([*(one.extra_fields["small"] for one in item.item)] * 2)
    assert sizes == [1]
    assert all(same(one, np.arange(200 + place % 3)) for place, one in enumerate(loaded))
    assert not any(np.shares_memory(one, other) for one, other in combinations(loaded, 2))


# The classes of rollouts


class Model(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True, extra="allow")
    status: Status = Status.COMPLETED
    pixels: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Data:
    status: Status
    pixels: Any
    more: tuple[Any, ...] = ()


@dataclass
class Holding:
    pixels: Any
    status: Status = Status.COMPLETED
    others: dict[str, Any] = field(default_factory=dict)


DONE = Status.COMPLETED


HOLDERS: dict[str, tuple[type, Callable[[Any, Any], Any], Callable[[Any], list[Any]]]] = {
    "dict": (dict, lambda a, b: {"status": DONE, "pixels": [a, {"b": b}]},
             lambda r: [r["pixels"][0], r["pixels"][1]["b"]]),
    "model": (Model, lambda a, b: Model(pixels=a, more={"b": (b, 1)}), lambda r: [r.pixels, r.more["b"][0]]),
    "frozen dataclass": (Data, lambda a, b: Data(DONE, a, (b, "x")), lambda r: [r.pixels, r.more[0]]),
    "named tuple": (Holding, lambda a, b: Holding(Pair(a, [b])), lambda r: [r.pixels.left, r.pixels.right[0]]),
    "objects": (Holding, lambda a, b: Holding(objects(a, b)), lambda r: [*r.pixels]),
    "nested": (Holding, lambda a, b: Holding([Data(DONE, a)], others={"m": Model(pixels=b)}),
               lambda r: [r.pixels[0].pixels, r.others["m"].pixels]),
}  # fmt: skip


def objects(*items: Any) -> np.ndarray[Any, Any]:
    array = np.empty(len(items), object)
    for place, item in enumerate(items):
        array[place] = item
    return array


@pytest.mark.parametrize("name", HOLDERS)
async def test_load_into_finds_handles_in_rollouts_of_every_class(in_folder: Kept, name: str) -> None:
    kind, make, arrays = HOLDERS[name]
    fields = ["pixels", "more"] if kind in (dict, Model, Data) else ["pixels"] + ["others"] * (kind is Holding)
    async with in_folder.opened(rollout_type=kind, types=[Data, Model, Pair]) as buffer:
        await buffer.put([make(experts(1), experts(2)), make(experts(3), np.arange(2))], TASK)
        async with buffer.lease_batch({TASK: 1}, deferred=fields, timeout=0) as lease:
            rollouts = lease.items[TASK][0].item
            assert all(type(one) is ArrayHandle for rollout in rollouts for one in arrays(rollout))
            assert load_into(lease.items) is lease.items
            found = [one for rollout in rollouts for one in arrays(rollout)]
            expected = [experts(1), experts(2), experts(3), np.arange(2)]
            wanted = expected if len(found) == 4 else expected[::2]
            assert all(map(same, found, wanted))
