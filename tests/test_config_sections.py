"""Configs from sections of training configs: mappings and dataclasses, without any framework."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

from replaybuf import ConfigError, ReplayBufferConfig, RolloutState
from replaybuf.errors import MissingDriverError
from replaybuf.verl import from_groups


@dataclasses.dataclass
class Section:
    url: str = "memory://"
    capacity: int | None = 8


@dataclasses.dataclass
class Misspelt(Section):
    samples_per_inserts: float = 1.0


def test_a_dataclass_is_a_section() -> None:
    config = ReplayBufferConfig.from_mapping(Section(capacity=64))
    assert (config.url, config.capacity) == ("memory://", 64)


def test_a_field_that_the_store_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"samples_per_inserts is no field; did you mean samples_per_insert\?"):
        ReplayBufferConfig.from_mapping(Misspelt())


@pytest.mark.parametrize("target", ["replaybuf.ReplayBufferConfig", "replaybuf.config.ReplayBufferConfig", ""])
def test_a_target_may_name_the_config(target: str) -> None:
    assert ReplayBufferConfig.from_mapping({"_target_": target, "url": "memory://"}).url == "memory://"


def test_a_target_of_another_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="_target_ is no field"):
        ReplayBufferConfig.from_mapping({"_target_": "verl.MessageQueue", "url": "memory://"})


@pytest.mark.parametrize("section", [None, "memory://", ["memory://"], Section])
def test_what_is_no_section_is_refused(section: Any) -> None:
    with pytest.raises(ConfigError, match="expected a mapping or a dataclass, got"):
        ReplayBufferConfig.from_mapping(section)


def test_without_verl_its_batches_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(MissingDriverError, match="pip install verl"):
        from_groups([[RolloutState(message=[])]])
