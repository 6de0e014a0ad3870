"""Configs: where they come from, what they refuse, what they never show."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from replaybuf import AsyncReplayBufferConfig, ConfigError, ReplayBufferConfig, RolloutState, SyncReplayBufferConfig
from replaybuf.integrations.chunks.chunk_buffer import ChunkBufferConfig
from replaybuf.produce import SyncProduceStrategy
from replaybuf.rules.policies import FIFOPolicy, StalenessPolicy
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.stores import build, fill


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_section_of_a_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"train.{kind}"
    file.write_text('{"trainer": {"replay_buffer": {"url": "sqlite:///run.db", "policy": "fifo"}}}')
    if kind == "yaml":
        file.write_text("trainer:\n  replay_buffer:\n    url: sqlite:///run.db\n    policy: fifo\n")
    config = ReplayBufferConfig.from_file(file, section="trainer.replay_buffer")
    assert (config.url, config.policy) == ("sqlite:///run.db", "fifo")
    assert {config: "a config may be a key"}


def test_an_error_buffer_is_one_number_or_two(tmp_path: Path) -> None:
    """A list in a file, a number alone in the environment."""
    file = tmp_path / "train.yaml"
    file.write_text("url: memory://\nmax_times_sampled: 0\nsamples_per_insert: 2\nerror_buffer: [-4, 8.5]\n")
    config = ReplayBufferConfig.from_file(file)
    assert config.error_buffer == (-4, 8.5)
    assert hash(config.build().limits)
    assert ReplayBufferConfig.from_env(dict(_ENVIRON, REPLAYBUF_ERROR_BUFFER="4")).error_buffer == 4
    with pytest.raises(ConfigError, match="REPLAYBUF_ERROR_BUFFER: "):
        ReplayBufferConfig.from_env(dict(_ENVIRON, REPLAYBUF_ERROR_BUFFER="[0, 64]"))
    with pytest.raises(ConfigError, match="error_buffer"):
        ReplayBufferConfig(url="memory://", samples_per_insert=1, error_buffer=[1, 2, 3])  # type: ignore[arg-type]


_ENVIRON = {"REPLAYBUF_URL": "memory://", "REPLAYBUF_SAMPLES_PER_INSERT": "1"}


@pytest.mark.parametrize("capacity", ["1000", 1000, 1000.0])
def test_a_number_in_a_text_is_that_number(capacity: Any) -> None:
    """As environment variables and command lines have it."""
    assert ReplayBufferConfig.from_mapping({"url": "sqlite://", "capacity": capacity}).rules().limits.capacity == 1000


@pytest.mark.parametrize("name", ["capacity", "min_size", "max_times_sampled", "samples_per_insert", "put_timeout"])
def test_yes_and_no_are_no_numbers(name: str) -> None:
    """`capacity: yes` in a YAML file was a capacity of 1."""
    for value in (True, False):
        with pytest.raises(ConfigError, match=f"{name}: .*expected a number, got {value}"):
            ReplayBufferConfig.from_mapping({"url": "sqlite://", name: value})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"url": "memory://", "policy": "lru"}, "policy: unknown policy 'lru' .there are fifo, lifo, pri"),
        ({"url": "memory://", "remover": "fif"}, "remover: unknown policy 'fif'; did you mean 'fifo'"),
        ({"url": "mysql://user:geheim@host/db"}, "url: 'mysql' is not supported"),
        ({"url": "run.db"}, "url: can't read the database url: .*sqlite:///run.db"),
    ],
)
def test_wrong_policies_and_urls_are_refused_where_the_config_is_made(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        ReplayBufferConfig(**wrong)  # type: ignore[arg-type]
    assert "geheim" not in str(raised.value)


@pytest.mark.parametrize("url", ["sqlite:///~/run.db", "sqlite:///~/run.db\n"])
async def test_a_url_may_begin_at_home_and_end_with_a_newline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """As a shell would have it, and a block of YAML."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    async with ReplayBufferConfig(url=url).build() as buffer:
        await buffer.count("math", "completed")
    assert (tmp_path / "run.db").exists()
    assert not (tmp_path / "~").exists()
    for named in (url, "~/run.db"):
        assert open_reader(named).path == tmp_path / "run.db"


def test_an_empty_section_has_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("produce:\n")
    assert SyncProduceStrategy.from_file(tmp_path / "train.yaml", section="produce") == SyncProduceStrategy()


@pytest.mark.parametrize(
    ("text", "section", "message"),
    [
        (None, None, "can't read"),
        ("url: sqlite://", "replay", "no section 'replay'"),
        ("- 1", None, "expected a mapping"),
        ("url: [", None, "can't read"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str | None, section: str | None, message: str) -> None:
    file = tmp_path / "train.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        ReplayBufferConfig.from_file(file, section=section)


def test_the_environment() -> None:
    environ = {"REPLAYBUF_URL": "sqlite:///run.db", "REPLAYBUF_LOCK_TIMEOUT": "2.5", "OTHER": "x"}
    config = ReplayBufferConfig.from_env(environ | {"REPLAYBUF_ROLLOUT_TYPE": "builtins:dict"})
    assert (config.url, config.lock_timeout, config.policy) == ("sqlite:///run.db", 2.5, "staleness")
    assert config.rollout_type is dict


def test_none_in_the_environment_is_none_where_a_field_takes_it() -> None:
    environ = {"REPLAYBUF_URL": "memory://", "REPLAYBUF_HISTORY": "none"}
    assert ReplayBufferConfig.from_env(environ).history is None
    with pytest.raises(ConfigError, match="REPLAYBUF_LOCK_TIMEOUT"):
        ReplayBufferConfig.from_env(environ | {"REPLAYBUF_LOCK_TIMEOUT": "none"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "REPLAYBUF_URL is missing"),
        ({"REPLAYBUF_CAPACITY": "many"}, "REPLAYBUF_CAPACITY: Input should be a valid integer"),
        ({"REPLAYBUF_CAPCITY": "5"}, r"REPLAYBUF_CAPCITY is unknown; did you mean REPLAYBUF_CAPACITY\?"),
        ({"REPLAYBUF_POLCY": "fifo"}, r"REPLAYBUF_POLCY is unknown; did you mean REPLAYBUF_POLICY\?"),
        (
            {"REPLAYBUF_SAMPLE_PER_INSERT": "1"},
            r"REPLAYBUF_SAMPLE_PER_INSERT is unknown; did you mean REPLAYBUF_SAMPLES_PER_INSERT\?",
        ),
    ],
)
def test_what_is_wrong_in_the_environment_names_the_variable(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplayBufferConfig.from_env(environ and {"REPLAYBUF_URL": "memory://", **environ})


def test_variables_of_the_command_line_and_of_other_configs_are_no_typos() -> None:
    variables = {"REPLAYBUF_URL", "REPLAYBUF_TOKEN"}
    configs = (ChunkBufferConfig, SyncProduceStrategy)
    variables |= {f"{config.env_prefix}{name.upper()}" for config in configs for name in config.model_fields}
    environ = dict.fromkeys(variables, "1") | {"REPLAYBUF_URL": "memory://"}
    assert ReplayBufferConfig.from_env(environ).url == "memory://"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "ReplayBufferConfig: url is missing"),
        ({"url": "memory://", "archive": "7 dayz"}, "archive: expected a number of groups, or a time"),
        ({"url": "memory://", "archive": 0}, "archive must be a whole number of at least 1, got 0"),
        ({"url": "memory://", "unfit": -1}, "unfit must be a whole number of at least 0, got -1"),
        ({"url": "memory://", "unfit": True}, "expected a number of groups, or a time"),
        ({"url": "memory://", "unfit": "-1s"}, "unfit: expected a number of groups, or a time"),
        ({"url": "memory://", "seed": -1}, "seed must be a whole number"),
        ({"url": "memory://", "on_full": "block"}, "needs a capacity"),
        ({"url": "memory://", "policy": "json:JSONDecoder"}, "'json:JSONDecoder' is no ReplayPolicy"),
        ({"url": "memory://", "max_time_sampled": 2}, "max_time_sampled is no field; did you mean max_times_sampled?"),
        ({"url": "memory://", "flavour": "fifo"}, "flavour is no field (fields: url, name, policy"),
        *(({"url": "memory://", "capacity": n}, "capacity") for n in ("a thousand", "1000 groups", "", "1e3", 0.5)),
        ({"url": "memory://", "on_full": "wait"}, "on_full: Input should be 'evict', 'block' or 'reject'"),
        ({"url": "memory://", "rollout_type": "nowhere:X"}, "No module named 'nowhere'"),
    ],
)
def test_what_is_wrong_is_said_on_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ReplayBufferConfig(**values).build()
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


class Training(BaseModel):
    replay_buffer: ReplayBufferConfig


@pytest.mark.parametrize(
    ("field", "value", "place", "message"),
    [
        ("capacity", "x", ("replay_buffer", "capacity"), "Input should be a valid integer"),
        ("capcity", 4, ("replay_buffer", "capcity"), "capcity is no field; did you mean capacity?"),
        ("capacity", -1, ("replay_buffer",), "capacity must be a whole number of at least 1, got -1"),
    ],
)
def test_in_another_pydantic_model_the_place_is_named(field: str, value: Any, place: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Training.model_validate({"replay_buffer": {"url": "postgresql://u:s3cret@h/d", field: value}})
    assert [error["loc"] for error in caught.value.errors()] == [place]
    assert message in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("given", [{"url": "postgresql+x://u:s3cret@h/d"}, "postgresql://u:s3cret@h/d"])
def test_in_another_pydantic_model_a_refused_url_is_not_shown(given: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Training.model_validate({"replay_buffer": given})
    assert "s3cret" not in str(caught.value)


def test_a_subclass_may_ignore_fields_that_it_does_not_have() -> None:
    class Lenient(ReplayBufferConfig):
        model_config = ConfigDict(extra="ignore")

    assert Lenient.model_validate({"url": "memory://", "theirs": 1}).url == "memory://"


def test_sync_is_fifo_and_async_is_most_stale_first() -> None:
    """A policy may be a name, a class or an instance."""
    assert isinstance(AsyncReplayBufferConfig().build().policy, StalenessPolicy)
    named = (ReplayBufferConfig(url="memory://", policy=policy) for policy in ("fifo", FIFOPolicy, FIFOPolicy()))
    for config in (SyncReplayBufferConfig(), *named):
        assert isinstance(config.build().policy, FIFOPolicy)


@pytest.mark.parametrize(
    ("archive", "groups", "seconds"),
    [
        (None, None, None),
        (100, 100, None),
        ("100", 100, None),
        ("90s", None, 90),
        ("1.5h", None, 5400),
        ("7d", None, 604_800),
    ],
)
def test_what_is_kept_for_sql_is_a_number_or_a_time(archive: Any, groups: int | None, seconds: float | None) -> None:
    limits = ReplayBufferConfig(url="memory://", archive=archive, unfit=archive).rules().limits
    assert (limits.archive_groups, limits.archive_seconds) == (groups, seconds)
    assert (limits.unfit_groups, limits.unfit_seconds) == (groups, seconds)
    assert limits.archives == limits.keeps_unfit == (archive is not None)


def test_a_seed_is_that_of_both_policies() -> None:
    rules = ReplayBufferConfig(url="memory://", policy="uniform", remover="uniform", seed=7).rules()
    assert (rules.sampler.seed, rules.remover.seed) == (7, 7)


@pytest.mark.parametrize(
    ("url", "driver_name"),
    [
        ("sqlite:///run.db", "sqlite"),
        ("sqlite:////data/run.db", "sqlite"),
        ("sqlite:///:memory:", "sqlite"),
        ("sqlite://", "sqlite"),
        ("postgresql://u@h/d", "postgresql+asyncpg"),
        ("postgres://u@h/d", "postgresql+asyncpg"),
        ("postgresql+asyncpg://u@h/d?sslmode=require", "postgresql+asyncpg"),
    ],
)
def test_urls_are_accepted_as_people_write_them(url: str, driver_name: str) -> None:
    parsed = parse_url(url)
    assert parsed.drivername == driver_name
    assert dict(parsed.query) == ({"sslmode": "require"} if "sslmode" in url else {})


def test_converters_may_be_named_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("url: memory://\nconverters:\n  fractions:Fraction: [fraction, builtins:str, fractions:Fraction]\n")
    for config in (
        ReplayBufferConfig.from_file(file),
        ReplayBufferConfig(url="memory://", converters={Fraction: ("fraction", str, Fraction)}),
    ):
        codec = config.build().storage.codec
        [restored] = codec.decode(codec.encode([RolloutState(message=[], reward=Fraction(1, 3))]))
        assert restored.reward == Fraction(1, 3)
        assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("converters", "message"),
    [
        ({"nowhere:Class": ["a", "builtins:str", "builtins:str"]}, "converters: .*No module named 'nowhere'"),
        ({Fraction: ["a", str]}, "converters: Field required"),
        ({Fraction: ["a", "nowhere:f", str]}, "converters: .*No module named 'nowhere'"),
        ("[]", "converters: Input should be a valid dictionary"),
        ({"math:pi": ["a", str, str]}, "3.14.* is no class"),
    ],
)
def test_a_wrong_converter_is_a_config_error(converters: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ReplayBufferConfig(url="memory://", converters=converters).build()
    assert len(str(caught.value).splitlines()) == 1


# Sections of training configs


@dataclasses.dataclass
class Section:
    url: str = "memory://"
    capacity: int | None = 8


def test_a_dataclass_is_a_section() -> None:
    config = ReplayBufferConfig.from_mapping(Section(capacity=64))
    assert (config.url, config.capacity) == ("memory://", 64)


@pytest.mark.parametrize("target", ["replaybuf.ReplayBufferConfig", "replaybuf.config.ReplayBufferConfig", ""])
def test_a_target_may_name_the_config(target: str) -> None:
    assert ReplayBufferConfig.from_mapping({"_target_": target, "url": "memory://"}).url == "memory://"


Misspelt = dataclasses.make_dataclass("Misspelt", [("polcy", str, "")], bases=(Section,))
_POLICY = r"^ReplayBufferConfig: polcy is no field; did you mean policy\?$"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"url": "memory://", "polcy": "fifo"}, _POLICY),
        ({"url": "memory://", True: 1}, "True is no field: names are texts"),
        (Misspelt(), _POLICY),
        ({"url": "memory://", "_target_": "verl.MessageQueue"}, "_target_ is no field"),
        *((value, "expected a mapping or a dataclass, got") for value in (None, "memory://", ["memory://"], Section)),
    ],
)
def test_what_is_no_section_or_has_other_fields_is_refused(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplayBufferConfig.from_mapping(section)


def test_files_that_a_url_names_stay_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a change of the working directory."""
    monkeypatch.chdir(tmp_path)
    assert parse_url("postgresql://user@host/db?passfile=pass").query["passfile"] == str(tmp_path / "pass")


async def test_a_change_of_the_working_directory_leads_to_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative URL, and relative paths of payloads, snapshots, exports and datasets, mean those of their call."""
    for name in ("here", "there", "here/payloads"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "there")
    async with build("sqlite:///run.db") as other:
        await fill(other, 1)
    monkeypatch.chdir(tmp_path / "here")
    buffer = build("sqlite:///run.db", payloads="payloads", payload_threshold=0)
    monkeypatch.chdir(tmp_path / "there")
    async with buffer:
        await fill(buffer, 30)
        assert buffer.storage.url.database == str(tmp_path / "here" / "run.db")
        assert await asyncio.gather(*(buffer.count_where({}) for _ in range(20))) == [30] * 20
        assert buffer.storage.engine._wal_checkpoints._path == str(tmp_path / "here" / "run.db-wal")  # type: ignore[attr-defined]
        calls = (buffer.save("saved"), buffer.export("all.jsonl"))
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)  # they have begun
        monkeypatch.chdir(tmp_path / "here")
        saved, *_ = await asyncio.gather(*tasks)
        assert saved.parent == tmp_path / "there" / "saved"
        assert (tmp_path / "there" / "all.jsonl").exists()
        monkeypatch.chdir(tmp_path / "there")
    assert sorted(os.listdir(tmp_path / "here")) == ["payloads", "run.db"]
    assert sorted(os.listdir(tmp_path / "there")) == ["all.jsonl", "run.db", "saved"]
