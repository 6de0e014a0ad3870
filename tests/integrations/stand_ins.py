"""Stand-ins for modules of frameworks that can't be installed here, with the parts of them that the pages import."""

from __future__ import annotations

import ast
import dataclasses
import os
import sys
from collections import UserDict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.frameworks import Sample


class BatchedDataDict(UserDict[str, Any]):
    """NeMo-RL: nemo_rl/distributed/batched_data_dict.py"""


@dataclasses.dataclass
class Experience:
    """OpenRLHF: openrlhf/trainer/ppo_utils/experience.py; with arrays in place of tensors."""

    sequences: np.ndarray[Any, Any]
    action_mask: np.ndarray[Any, Any]
    rewards: np.ndarray[Any, Any]
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


class RolloutDataSource:
    """slime: slime/rollout/data_source.py; the prompts are 0, 1, 2, ..."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.sample_offset = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        numbers = range(self.sample_offset, self.sample_offset + num_samples)
        self.sample_offset += num_samples
        return [[Sample(index=number, prompt=f"{number}+5=") for _ in range(2)] for number in numbers]

    def save(self, rollout_id: int) -> None:
        Path(f"place-{rollout_id}").write_text(str(self.sample_offset))

    def load(self, rollout_id: int | None = None) -> None:
        if (path := Path(f"place-{rollout_id}")).exists():
            self.sample_offset = int(path.read_text())


_MODULES = {
    "nemo_rl.distributed.batched_data_dict": BatchedDataDict,
    "openrlhf.trainer.ppo_utils.experience": Experience,
    "slime.rollout.data_source": RolloutDataSource,
    "slime.utils.types": Sample,
}


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the frameworks' names be imported."""
    for name, cls in _MODULES.items():
        module = ModuleType(name)
        setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, name, module)
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))


def checkout(variable: str, path: str) -> ast.Module:
    """Return the source of a framework, from the checkout that a variable names."""
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    return ast.parse((Path(os.environ[variable]) / path).read_text("utf-8"))


def methods_of(tree: ast.Module, name: str) -> dict[str, list[str]]:
    """Return the public methods of a class with the names of their arguments."""
    [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    functions = [node for node in cls.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {function.name: [argument.arg for argument in function.args.args] for function in functions}
