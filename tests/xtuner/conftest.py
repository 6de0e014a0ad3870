"""xtuner as it is in a checkout, for tests that run it in processes of their own; buffers beside a stand-in for it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.xtuner import stand_in
from tests.xtuner.tiny_model import make

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def checkout() -> Path:
    folder = os.environ.get("REPLAYBUF_XTUNER")
    if not folder:
        pytest.skip("REPLAYBUF_XTUNER names no checkout of xtuner")
    return Path(folder)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("model")
    make(folder)
    return folder


@pytest.fixture
def theirs(checkout: Path, model: Path) -> dict[str, str]:
    """The environment of a process that imports xtuner from the checkout."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(PROJECT), str(checkout)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "QWEN3_4B_PATH": str(model),
        "XTUNER_USE_SGLANG": "1",  # only its name: the engines of the tests are fakes
    }


@pytest.fixture
def xtuner() -> Iterator[ModuleType]:
    """`replaybuf.integrations.xtuner`, beside the stand-in."""
    with stand_in.installed():
        import replaybuf.integrations.xtuner

        yield replaybuf.integrations.xtuner


@pytest.fixture
async def build(xtuner: ModuleType) -> AsyncIterator[Callable[..., Any]]:
    """A function that builds buffers, which are closed after the test."""
    buffers: list[Any] = []

    def build(url: str, kind: str = "Async", **options: Any) -> Any:
        buffers.append(getattr(xtuner, f"{kind}ReplayBufferConfig")(url=url, **options).build())
        return buffers[-1]

    yield build
    for buffer in buffers:
        await buffer.close()
