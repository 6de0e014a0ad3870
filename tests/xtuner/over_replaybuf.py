"""A pytest plugin: xtuner's own tests, with the import of its replay buffer changed to replaybuf's.

`REPLAYBUF_XTUNER_URL` is the database; each buffer that a test builds is a new one there.
"""

from __future__ import annotations

import os
import uuid
from types import ModuleType
from typing import Any

import xtuner.v1.rl.replay_buffer  # type: ignore[import-not-found]

import replaybuf.integrations.xtuner


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


_change(xtuner.v1.rl.replay_buffer)
