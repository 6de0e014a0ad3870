"""Storing the torch tensors in states of data loaders (mostly of random generators) as arrays.

torch is needed only where there are tensors.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_TENSOR = "__torch_tensor__"


def with_arrays(state: Any) -> Any:
    """Return the state with arrays in place of tensors."""
    if isinstance(state, dict):
        return {name: with_arrays(value) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(with_arrays(value) for value in state)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(state, torch.Tensor):
        return {_TENSOR: state.detach().cpu().numpy()}
    return state


def with_tensors(state: Any) -> Any:
    """Undo `with_arrays`."""
    if isinstance(state, dict):
        if state.keys() == {_TENSOR}:
            torch: Any = importlib.import_module("torch")
            return torch.from_numpy(state[_TENSOR].copy())
        return {name: with_tensors(value) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(with_tensors(value) for value in state)
    return state
