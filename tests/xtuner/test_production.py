"""xtuner's own producers over `replaybuf.integrations.xtuner`, in processes of their own (`production`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integrations.scripts import printed_by
from tests.xtuner.conftest import PROJECT

pytestmark = pytest.mark.frameworks


def output_of(arguments: list[str], environment: dict[str, str]) -> str:
    return printed_by(arguments, PROJECT, environment).splitlines()[-1]


@pytest.mark.parametrize("kind", ["sync", "async", "disaggregated"])
def test_their_producers_train_each_prompt_once(
    kind: str, shared_url: str, model: Path, theirs: dict[str, str]
) -> None:
    steps = json.loads(output_of(["-m", "tests.xtuner.production", kind, shared_url, str(model)], theirs))
    assert [len(batch) for batch in steps] == [6, 6, 6]
    trained = [prompt for batch in steps for prompt in batch]
    assert len(set(trained)) == len(trained)
    assert set(trained) <= set(range(40))


_TAKES = """
from pydantic import TypeAdapter
from replaybuf.integrations.xtuner import AsyncReplayBufferConfig
from xtuner.v1.train.rl_trainer import RLColocateTrainerConfig
config = AsyncReplayBufferConfig(url="sqlite:///run.db")
field = RLColocateTrainerConfig.model_fields["replay_buffer_config"]
print(TypeAdapter(field.annotation).validate_python(config) is config)
"""


def test_the_rules_are_those_of_their_buffer(theirs: dict[str, str]) -> None:
    assert output_of(["-m", "tests.xtuner.in_xtuner", "600"], theirs) == "[]"


def test_their_trainers_take_the_config(theirs: dict[str, str]) -> None:
    assert output_of(["-c", _TAKES], theirs) == "True"
