"""Beside xtuner itself, in processes of their own: its rules, and its trainers' config."""

from __future__ import annotations

import pytest

from tests.integrations.scripts import printed_by
from tests.xtuner.conftest import PROJECT

pytestmark = pytest.mark.frameworks


def output_of(arguments: list[str], environment: dict[str, str]) -> str:
    return printed_by(arguments, PROJECT, environment).splitlines()[-1]


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
