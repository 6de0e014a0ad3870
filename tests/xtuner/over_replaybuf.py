"""A pytest plugin: xtuner's own tests, with the import of its replay buffer changed to replaybuf's.

`REPLAYBUF_XTUNER_URL` is the database; each buffer that a test builds is a new one there.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import replaybuf.integrations.xtuner

_CHANGED = "xtuner.v1.rl.replay_buffer"


class _Changed(MetaPathFinder):
    """Lets the module be imported as it is, and then gives its names the meaning that they have in replaybuf."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _CHANGED or (spec := PathFinder.find_spec(name, path, target)) is None:
            return None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _change(module: ModuleType) -> None:
    names = {name: getattr(replaybuf.integrations.xtuner, name) for name in replaybuf.integrations.xtuner.__all__}
    for name, value in names.items():
        setattr(module, name, _with_a_url(value) if name.endswith("Config") else value)


def _with_a_url(config: Any) -> Any:
    """Return a config whose default is a new buffer in the database."""
    url = os.environ["REPLAYBUF_XTUNER_URL"]

    def build(self: Any) -> replaybuf.integrations.xtuner.ReplayBuffer:
        return config(url=url, name=uuid.uuid4().hex).build()

    return type(config)(config.__name__, (config,), {"build": build, "__module__": config.__module__})


sys.meta_path.insert(0, _Changed())
