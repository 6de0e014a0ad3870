"""xtuner as it is in a checkout, for tests that run it in processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
