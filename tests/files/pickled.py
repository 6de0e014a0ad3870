"""Files as xtuner and torch write them, made without either: pickles of stand-ins for their classes."""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict


class Tensor:
    """A row of float32 in a storage of the file."""

    def __init__(self, values: list[float]) -> None:
        self.values = np.array(values, "<f4")

    def __reduce__(self) -> Any:
        rebuild = sys.modules["torch._utils"]._rebuild_tensor_v2  # type: ignore[attr-defined]
        return rebuild, (_Storage(self.values), 0, (len(self.values),), (1,), False, None)


class _Storage:
    def __init__(self, values: Any) -> None:
        self.values = values


@contextmanager
def classes() -> Iterator[types.SimpleNamespace]:
    """Make stand-ins for the classes of xtuner and torch that a saved buffer names, as long as one is being written."""

    class Status(Enum):
        COMPLETED = "completed"
        ABORTED = "aborted"

    class SampleParams(BaseModel):
        n: int = 1

    class RolloutState(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        message: list[dict[str, Any]]
        rollout_id: int | None = None
        response: str | None = None
        response_ids: list[int] | None = None
        logprobs: Any = None
        routed_experts: Any = None
        response_model_steps: list[int] | None = None
        seq_staleness: int = 0
        reward: dict[str, Any] | None = None
        sample_params: SampleParams = SampleParams()
        status: Status = Status.COMPLETED
        extra_fields: dict[str, Any] = {}

    @dataclasses.dataclass
    class StorageItem:
        item: list[Any]
        uid: int
        timestamp_id: int
        task_name: str
        status: Any
        staleness: int

    @dataclasses.dataclass
    class SerializedRayObjectRef:
        value: Any

    def _rebuild_tensor_v2(*args: Any) -> None: ...

    class FloatStorage: ...

    homes: dict[str, list[Any]] = {
        **{name: [] for name in ("xtuner", "xtuner.v1", "xtuner.v1.data_proto", "xtuner.v1.rl")},
        "xtuner.v1.data_proto.rl_data": [Status, SampleParams, RolloutState],
        "xtuner.v1.rl.replay_buffer": [StorageItem, SerializedRayObjectRef],
        "torch._utils": [_rebuild_tensor_v2],
        "torch": [FloatStorage],
    }
    kept = {name: sys.modules.get(name) for name in homes}
    made: dict[str, Any] = {}
    for home, members in homes.items():
        sys.modules[home] = types.ModuleType(home)
        for one in members:
            one.__module__, one.__qualname__ = home, one.__name__
            setattr(sys.modules[home], one.__name__, one)
            made[one.__name__] = one
    try:
        yield types.SimpleNamespace(**made)
    finally:
        for home, module in kept.items():
            if module is None:
                del sys.modules[home]
            else:
                sys.modules[home] = module


def save(value: Any, path: Path) -> None:
    """Write a value as torch.save does: a zip file with a pickle, and the bytes of its storages."""
    storages: list[_Storage] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, one: Any) -> Any:
            if not isinstance(one, _Storage):
                return None
            storages.append(one)
            return "storage", sys.modules["torch"].FloatStorage, str(len(storages) - 1), "cpu", len(one.values)  # type: ignore[attr-defined]

    pickled = io.BytesIO()
    Pickler(pickled, protocol=2).dump(value)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("replay_buffer/data.pkl", pickled.getvalue())
        archive.writestr("replay_buffer/byteorder", "little")
        for number, one in enumerate(storages):
            archive.writestr(f"replay_buffer/data/{number}", one.values.tobytes())


def saved_buffer(path: Path, groups: int = 3) -> None:
    """Write a buffer as xtuner saves one: groups of two rollouts, the second group aborted."""
    with classes() as made:
        items = []
        for number in range(groups):
            status = made.Status.ABORTED if number == 1 else made.Status.COMPLETED
            rollouts = [
                made.RolloutState(
                    message=[{"role": "user", "content": f"{number} + {index}?"}],
                    rollout_id=2 * number + index,
                    response=str(number + index),
                    response_ids=[1, 2, number],
                    logprobs=Tensor([-0.5, -0.25, 0.0]),
                    routed_experts=made.SerializedRayObjectRef(np.arange(6, dtype=np.uint8).reshape(3, 2)),
                    response_model_steps=[4, 4, 5],
                    seq_staleness=number,
                    reward={"score": float(index)},
                    status=status,
                )
                for index in range(2)
            ]
            items.append(made.StorageItem(rollouts, number + 1, number + 1, "math", status, number))
        state = {"items": items, "next_uid": groups + 1, "next_timestamp_id": groups + 1}
        save({"policy": "FIFOReplayPolicy", "storage": "NaiveStorage", "storage_state": state}, path)
