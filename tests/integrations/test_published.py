"""Pages of frameworks, with what stands in for them."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import os
import pickle
import random
import statistics
import sys
import threading
from argparse import Namespace
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

import numpy as np
import pytest

from replaybuf import ConfigError, ReplayBufferConfig
from replaybuf.buffer.sync import SyncReplayBuffer
from replaybuf.errors import CheckpointError, InputError, MissingDriverError
from replaybuf.integrations.nemo_rl import TrajectoryBuffer
from replaybuf.values.codec.payload import Codec
from tests.frameworks import Sample
from tests.integrations.scripts import files_of, lines_of, output_of, printed_by
from tests.pages import DOCS, compare, examples_in


class BatchedDataDict(UserDict[str, Any]):
    """NeMo-RL: nemo_rl/distributed/batched_data_dict.py"""


@dataclasses.dataclass
class Experience:
    """OpenRLHF: openrlhf/trainer/ppo_utils/experience.py; with arrays in place of tensors."""

    sequences: np.ndarray[Any, Any]
    action_mask: np.ndarray[Any, Any]
    rewards: np.ndarray[Any, Any]
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


class RolloutDataSource:
    """slime: slime/rollout/data_source.py; the prompts are 0, 1, 2, ..."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.sample_offset = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        numbers = range(self.sample_offset, self.sample_offset + num_samples)
        self.sample_offset += num_samples
        return [[Sample(index=number, prompt=f"{number}+5=") for _ in range(2)] for number in numbers]

    def save(self, rollout_id: int) -> None:
        Path(f"place-{rollout_id}").write_text(str(self.sample_offset))

    def load(self, rollout_id: int | None = None) -> None:
        if (path := Path(f"place-{rollout_id}")).exists():
            self.sample_offset = int(path.read_text())


_MODULES = {
    "nemo_rl.distributed.batched_data_dict": BatchedDataDict,
    "openrlhf.trainer.ppo_utils.experience": Experience,
    "slime.rollout.data_source": RolloutDataSource,
    "slime.utils.types": Sample,
}


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the frameworks' names be imported."""
    for name, cls in _MODULES.items():
        module = ModuleType(name)
        setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, name, module)
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))


def checkout(variable: str, path: str) -> ast.Module:
    """Return the source of a framework, from the checkout that a variable names."""
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    return ast.parse((Path(os.environ[variable]) / path).read_text("utf-8"))


def methods_of(tree: ast.Module, name: str) -> dict[str, list[str]]:
    """Return the public methods of a class with the names of their arguments."""
    [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    functions = [node for node in cls.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {function.name: [argument.arg for argument in function.args.args] for function in functions}


Closed = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_in_place(monkeypatch)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def closed() -> Iterator[Closed]:
    """A function that has what it is given closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def later(opened: Any) -> Any:
            stack.callback(lambda: getattr(opened, "buffer", opened).close())
            return opened

        yield later


def names_in(folder: str, file: str) -> dict[str, Any]:
    """Run a script of docs/examples and return its names."""
    namespace: dict[str, Any] = {"__name__": file.removesuffix(".py")}
    exec(compile(files_of(folder)[file], file, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("file", ["buffered.py", "rollout_queue.py"])
def test_the_lines_of_the_user_are_few(file: str) -> None:
    assert lines_of(files_of("frameworks")[file]) <= 32


# slime


@pytest.fixture
def slime_source(monkeypatch: pytest.MonkeyPatch, closed: Closed) -> Callable[[str], Any]:
    def source(url: str) -> Any:
        monkeypatch.setenv("REPLAYBUF_URL", url)
        return closed(names_in("frameworks", "buffered.py")["BufferedDataSource"](Namespace(rollout_batch_size=2)))

    return source


def test_slime_goes_on_with_what_was_interrupted_and_back_with_its_weights(
    shared_url: str, slime_source: Callable[[str], Any]
) -> None:
    source = slime_source(shared_url)
    first, second = source.get_samples(2)
    second[0].status, second[0].response, second[0].tokens = Sample.Status.ABORTED, "It is", [1, 2]
    second[1].status = Sample.Status.COMPLETED
    source.add_samples([second])
    source.save(4)
    assert source.get_samples(2) == [second, *[[Sample(index=2, prompt="2+5=")] * 2]]

    restarted = slime_source(shared_url)
    restarted.load(4)
    assert restarted.get_samples(2) == [second, *[[Sample(index=2, prompt="2+5=")] * 2]]
    assert first[0].index == 0


def test_slime_takes_groups_that_other_processes_have_finished(
    shared_url: str, slime_source: Callable[[str], Any]
) -> None:
    source = slime_source(shared_url)
    finished = [[Sample(index=number, status=Sample.Status.TRUNCATED)] for number in range(3)]
    with ReplayBufferConfig(url=shared_url, policy="fifo", rollout_type=Sample).build_sync() as generator:
        for group in finished:
            generator.put(group, "math")
    generate = names_in("frameworks", "buffered.py")["generate_rollout"]
    assert generate(source.args, 0, source) == finished[:2]


@pytest.mark.frameworks
def test_slime_calls_its_data_sources_like_this(slime_source: Callable[[str], Any]) -> None:
    theirs = methods_of(checkout("REPLAYBUF_SLIME", "slime/rollout/data_source.py"), "DataSource")
    ours = slime_source("memory://")
    for name, arguments in theirs.items():
        assert ["self", *inspect.signature(getattr(ours, name)).parameters] == arguments
    guide = checkout("REPLAYBUF_SLIME", "slime/utils/arguments.py")
    options = {node.value for node in ast.walk(guide) if isinstance(node, ast.Constant)}
    assert {"--data-source-path", "--rollout-function-path"} <= options


# OpenRLHF


def experience(number: int) -> Experience:
    tokens = np.arange(number, number + 6).reshape(2, 3)
    return Experience(tokens, tokens % 2 == 0, np.array([float(number), 1.0]), {"prompts": ["a", "b"]})


def test_openrlhf_gets_what_it_has_put(shared_url: str, closed: Closed) -> None:
    queue_of = names_in("frameworks", "rollout_queue.py")["RolloutQueue"]
    generator, trainer, restarted = (closed(queue_of(shared_url, 4)) for _ in range(3))
    states = {"episode": 0, "total_consumed_prompts": 8, "data_loader_state_dict": {"place": 2, "seed": None}}
    generator.put(([experience(1), experience(3)], states, 0.75, 1.5), block=True)
    generator.put(("eval", 3, {"pass@1": 0.5}), block=True)
    generator.put("done", block=True)
    samples, *rest_of_batch = trainer.get(block=True)
    assert rest_of_batch == [states, 0.75, 1.5]
    for put, source in zip(samples, [experience(1), experience(3)], strict=True):
        assert type(put) is Experience
        assert all(np.array_equal(getattr(put, name), getattr(source, name)) for name in ("sequences", "action_mask"))
        assert (put.rewards.tolist(), put.info) == (source.rewards.tolist(), source.info)
    trainer.lease.give_back()  # as when it dies in this step
    assert restarted.get(block=True)[1:] == (states, 0.75, 1.5)
    assert restarted.get(block=True) == ("eval", 3, {"pass@1": 0.5})
    assert restarted.get(block=True) == "done"


@pytest.mark.frameworks
def test_openrlhf_calls_its_queue_like_this() -> None:
    trainer = checkout("REPLAYBUF_OPENRLHF", "openrlhf/trainer/ppo_trainer_async.py")
    calls = [
        node
        for node in ast.walk(trainer)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self.rollout_queue.")
    ]
    ours = names_in("frameworks", "rollout_queue.py")["RolloutQueue"]
    assert calls
    for call in calls:
        method = ast.unparse(call.func).rpartition(".")[2]
        inspect.signature(getattr(ours, method)).bind(
            None, *call.args, **{word.arg: 0 for word in call.keywords if word.arg}
        )
    assert "self.rollout_queue = Queue(maxsize=queue_size)" in ast.unparse(trainer)
    tree = checkout("REPLAYBUF_OPENRLHF", "openrlhf/trainer/ppo_utils/experience.py")
    [theirs] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Experience"]
    fields = {
        node.target.id for node in theirs.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert set(Experience.__dataclass_fields__) <= fields


# NeMo-RL


def trajectory(number: int) -> dict[str, Any]:
    return {"batch": BatchedDataDict({"ids": np.arange(number)}), "rollout_metrics": {"number": number}}


def test_the_trajectories_of_the_script_are_as_it_says() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names_in("frameworks", "trajectories.py")
    assert printed.getvalue() == output_of(files_of("frameworks")["trajectories.py"])


def test_nemo_rl_gets_the_trajectories_of_its_step_and_no_older_ones(shared_url: str, closed: Closed) -> None:
    buffer: TrajectoryBuffer = closed(TrajectoryBuffer(shared_url, max_size=4))
    for number, (version, target) in enumerate([(0, 2), (1, 2), (2, 2), (1, 3), (1, 3)]):
        assert buffer.add(trajectory(number), version, target) == ("full" if number == 4 else "success")
    assert buffer.get_debug_info()["trajectory_versions"] == [0, 1, 2, 1]
    assert buffer.sample(3, current_weight_version=2, max_age_steps=1) is None  # one of three was too old
    assert buffer.size() == 3
    sample = buffer.sample(2, current_weight_version=2, max_age_steps=1)
    assert sample is not None
    assert [group["rollout_metrics"]["number"] for group in sample["trajectories"]] == [1, 2]
    assert all(type(group["batch"]) is BatchedDataDict for group in sample["trajectories"])
    assert sample["avg_trajectory_age"] == 0.5
    assert buffer.get_last_target_weight_already_generated() == 2
    assert buffer.get_existing_target_weights() == {3}
    assert (buffer.has_complete_batch(3, 1), buffer.get_trajectories_needed(3, 4, max_age_steps=2)) == (True, 3)
    buffer.clear()
    assert buffer.size() == 0


def test_nemo_rl_gets_no_part_of_a_batch_when_another_was_faster(
    shared_url: str, closed: Closed, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer: TrajectoryBuffer = closed(TrajectoryBuffer(shared_url, max_size=4))
    buffer.add(trajectory(0), 2, 2)
    monkeypatch.setattr(SyncReplayBuffer, "is_ready", lambda *_, **__: True)  # so it was a moment ago
    assert buffer.sample(2, current_weight_version=2, max_age_steps=1) is None
    assert buffer.size() == 1
    assert buffer.sample(0, current_weight_version=2, max_age_steps=1) is None


def test_no_trajectory_is_taken_where_nemo_rl_is_missing(
    shared_url: str, closed: Closed, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer: TrajectoryBuffer = closed(TrajectoryBuffer(shared_url, max_size=4))
    buffer.add(trajectory(0), 2, 2)
    monkeypatch.setitem(sys.modules, "nemo_rl.distributed.batched_data_dict", None)
    with pytest.raises(MissingDriverError, match="needs NeMo-RL where it is sampled"):
        buffer.sample(1, current_weight_version=2, max_age_steps=1)
    assert buffer.size() == 1


def test_nemo_rl_reads_no_trajectory_for_its_books(
    shared_url: str, tmp_path: Path, closed: Closed, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer: TrajectoryBuffer = closed(TrajectoryBuffer(shared_url, max_size=4))
    buffer.add(trajectory(0) | {"_ng_task_index": 7}, 1, 2)
    monkeypatch.setattr(Codec, "decode", None)
    assert buffer.get_debug_info()["target_weight_versions"] == [2]
    buffer.save_to_path(str(tmp_path / "saved"))
    assert buffer.load_from_path(str(tmp_path / "saved"))["next_ng_task_index"] == 8


def test_nemo_rl_goes_back_to_its_checkpoint(shared_url: str, tmp_path: Path, closed: Closed) -> None:
    path, pickled = tmp_path / "replay_buffer.pt", tmp_path / "theirs.pt"
    buffer = closed(TrajectoryBuffer(shared_url, max_size=8, drop_incomplete_targets_on_restore=True))
    for number, (version, target) in enumerate([(0, 1), (1, 2), (1, 2), (1, 3), (0, 3)]):
        buffer.add(trajectory(number) | {"_ng_task_index": number}, version, target)
    assert buffer.save_to_path(str(path)) == 5
    buffer.sample(2, 2, 1)
    restarted = closed(TrajectoryBuffer(shared_url, max_size=8, drop_incomplete_targets_on_restore=True))
    restored = restarted.load_from_path(str(path), num_prompts_per_step=2, current_training_step=2, max_age_steps=2)
    assert restored == {"num_trajectories": 5, "next_ng_task_index": 5}
    assert restarted.get_debug_info()["target_weight_versions"] == [2, 2]  # 1 is past, and one of 3 was too old
    assert restarted.get_last_target_weight_already_generated() == 1
    pickled.write_bytes(pickle.dumps({"trajectories": []}))
    with pytest.raises(InputError, match=r"theirs.pt isn't a file that TrajectoryBuffer.save_to_path wrote"):
        restarted.load_from_path(str(pickled))
    path.write_text('{"checkpoint": 77}')
    with pytest.raises(CheckpointError, match="77"):
        restarted.load_from_path(str(path))


@pytest.mark.parametrize("option", ["capacity", "max_times_sampled", "policy"])
def test_options_that_nemo_rl_decides_are_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        TrajectoryBuffer("memory://", 8, **{option: 2})


@pytest.mark.frameworks
@pytest.mark.parametrize("seed", range(20))
def test_nemo_rl_could_not_tell_them_apart(seed: int) -> None:
    tree = checkout("REPLAYBUF_NEMO_RL", "nemo_rl/algorithms/async_utils/replay_buffer.py")
    [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ReplayBufferImpl"]
    names: dict[str, Any] = {"Any": Any, "Optional": Optional, "Iterable": Iterable, "Counter": Counter}
    names |= {
        "ReplayBufferProtocol": object,
        "_threading": threading,
        "statistics": statistics,
        "print": lambda *_: None,
    }
    exec(compile(ast.Module([cls], []), "replay_buffer.py", "exec"), names)
    published = checkout("REPLAYBUF_NEMO_RL", "nemo_rl/algorithms/async_utils/interfaces.py")
    for name, arguments in methods_of(published, "ReplayBufferProtocol").items():
        if name not in ("state_dict", "load_state_dict"):  # the trainer calls those of paths
            assert [*inspect.signature(getattr(TrajectoryBuffer, name)).parameters] == arguments
    chance, step = random.Random(seed), 0
    ours, theirs = TrajectoryBuffer("memory://", 12), names["ReplayBufferImpl"](12, False)
    for number in range(80):
        if chance.random() < 0.7:
            versions = (max(0, step - chance.randrange(3)), step + chance.randrange(2))
            assert ours.add(trajectory(number), *versions) == theirs.add(trajectory(number), *versions)
        else:
            size, age = chance.randrange(1, 4), chance.randrange(1, 3)
            assert ours.has_complete_batch(step, size, age) == theirs.has_complete_batch(step, size, age)
            sample, expected = ours.sample(size, step, age), theirs.sample(size, step, age)
            assert (sample is None) == (expected is None)
            if sample is not None:
                numbers = [
                    [row["rollout_metrics"]["number"] for row in batch["trajectories"]] for batch in (sample, expected)
                ]
                assert numbers[0] == numbers[1]
                assert sample["avg_trajectory_age"] == expected["avg_trajectory_age"]
            step += chance.random() < 0.5
        info, expected_info = ours.get_debug_info(), theirs.get_debug_info()
        assert info == {name: expected_info[name] for name in info}
        assert ours.get_last_target_weight_already_generated() == theirs.get_last_target_weight_already_generated()
        assert ours.size() == theirs.size()


# Hydra: the example of docs/configuration.md; REPLAYBUF_TEST_UPDATE_DOCS=1 writes its output.


@pytest.mark.frameworks
def test_a_config_is_read_as_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    page = DOCS / "configuration.md"
    [(code, output)] = examples_in(page.read_text("utf-8"))
    (tmp_path / "example.py").write_text(code, "utf-8")
    begin = f"{code}```\n\n```\n"
    compare(page, f"{begin}{output}```", f"{begin}{printed_by(['example.py'], tmp_path)}```")
