"""Run beside a checkout of open-instruct: its DataPreparationActor is built, and its table used as its threads use it.

Packages that aren't installed (vllm, ray, torch, ...) are stood in for by empty ones: none of them touches the table.
Prints as JSON what came of it. The argument is the work_dir.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class _Anything(type):
    """Classes whose every attribute is another such class; called with a class or function, it gives that back."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else cls

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _StandIns(MetaPathFinder, Loader):
    """Finds what open-instruct imports and nothing else finds."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        importing: Any = sys._getframe(1)
        while importing is not None and "importlib" in importing.f_code.co_filename:
            importing = importing.f_back
        theirs = importing is not None and importing.f_globals.get("__name__", "").startswith("open_instruct")
        return ModuleSpec(name, self, is_package=True) if theirs and not name.startswith("open_instruct") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def main(work_dir: str) -> None:
    sys.meta_path.append(_StandIns())
    from open_instruct import data_loader, data_types, replay_buffer  # type: ignore[import-not-found]

    actor_class = data_loader.DataPreparationActor
    # The threads that generate and pack are not started, and there is no dataset.
    data_loader.HFDataLoader = lambda **_: None
    data_loader.ThreadPoolExecutor = lambda **_: SimpleNamespace(submit=lambda work: None)

    def actor() -> Any:
        names = actor_class.__init__.__code__.co_varnames[1 : actor_class.__init__.__code__.co_argcount]
        config = SimpleNamespace(
            replay_buffer=replay_buffer.ReplayBufferConfig(sampler="fifo", capacity=8, max_times_sampled=2)
        )
        given = {"config": config, "global_batch_size": 2, "work_dir": work_dir, "initial_state": None}
        return actor_class(**{name: given.get(name) for name in names})

    def processed(number: int) -> Any:
        request = data_types.RequestInfo([1], [0], [""], [""], [0.1], [True], [[]], [{"done": True}])
        answer = data_types.GenerationResult(
            [[5, 6]], ["stop"], [[1, 1]], request, number, f"0_{number}", logprobs=[[-1]]
        )
        return replay_buffer.ProcessedResult(
            answer, [[1, 2]], [[3]], ["math"], ["2+2"], [None], ["4"], [1.0], {"solved": 1.0}, 0.5
        )

    first = actor()._table
    for number in range(3):
        first.insert(f"0_{number}_{number}", processed(number))
    sampled = first.sample(2)
    first.shutdown()
    first.insert("0_3_3", processed(3))
    again = actor()._table  # of a run that was resumed
    print(
        json.dumps(
            {
                "table": type(first).__module__,
                "equal": sampled == [processed(0), processed(1)],
                "after_shutdown": [first.sample(2), len(first), first.is_shutdown],
                "resumed": [one.result.index for one in again.sample(9)],
                "left": len(again),
            }
        )
    )


if __name__ == "__main__":
    assert importlib.util.find_spec("replaybuf")
    main(sys.argv[1])
