"""Weights on disk: what is read is the newest complete save."""

import io
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from replaybuf.demo.adam import Adam
from replaybuf.demo.grpo import Trainer
from replaybuf.demo.policy import Policy
from replaybuf.demo.weights import FILE_NAME, Saved, load_policy, load_trainer, remove_leftovers, save_trainer
from replaybuf.errors import ReplayBufError


@pytest.fixture
def trainer() -> Trainer:
    """A small trainer after one update."""
    policy = Policy.create(0, hidden=4)
    adam = Adam(policy.parameters)
    adam.update(policy.parameters, {name: np.ones_like(value) for name, value in policy.parameters.items()})
    return Trainer(policy, adam, step=7)


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_a_trainer_comes_back_as_it_was_saved(tmp_path, trainer):
    save_trainer(tmp_path, Saved(trainer, 3, [4, 2, 9]))
    saved = load_trainer(tmp_path)
    loaded = saved.trainer
    assert (saved.step, loaded.adam.updates, saved.seed, saved.trained) == (7, 1, 3, [4, 2, 9])
    assert same(loaded.policy.parameters, trainer.policy.parameters)
    assert same(loaded.adam.first, trainer.adam.first)
    assert same(loaded.adam.second, trainer.adam.second)


def test_nothing_saved_is_none(tmp_path):
    assert load_trainer(tmp_path / "none") is None


def test_a_save_makes_the_directory(tmp_path, trainer):
    save_trainer(tmp_path / "a" / "b", Saved(trainer, 0))
    assert load_trainer(tmp_path / "a" / "b") is not None


def test_a_half_written_save_is_not_seen(tmp_path, trainer, monkeypatch):
    save_trainer(tmp_path, Saved(trainer, 0))
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    trainer.step = 8
    with pytest.raises(OSError, match="disk full"):
        save_trainer(tmp_path, Saved(trainer, 0))
    assert load_trainer(tmp_path).step == 7


def test_leftovers_of_killed_saves_are_removed(tmp_path, trainer):
    save_trainer(tmp_path, Saved(trainer, 0))
    (tmp_path / ".weights-123.tmp").write_bytes(b"half")
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_spoilt_file_is_a_clear_error(tmp_path, trainer):
    save_trainer(tmp_path, Saved(trainer, 0))
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ReplayBufError, match=r"weights\.npz can't be read"):
        load_trainer(tmp_path)


def test_pickled_arrays_are_refused(tmp_path):
    file = io.BytesIO()
    np.savez(file, step=np.array([{"a": 1}], dtype=object))
    (tmp_path / FILE_NAME).write_bytes(file.getvalue())
    with pytest.raises(ReplayBufError, match="can't be read"):
        load_trainer(tmp_path)


def test_weights_of_an_older_demo_are_a_clear_error(tmp_path):
    np.savez(tmp_path / FILE_NAME, allow_pickle=False, step=3, seed=0, updates=3)
    with pytest.raises(ReplayBufError, match=r"older demo.*--fresh"):
        load_trainer(tmp_path)


def test_workers_get_the_policy_and_its_step(tmp_path, trainer):
    assert load_policy(tmp_path) is None
    save_trainer(tmp_path, Saved(trainer, 0))
    policy, step = load_policy(tmp_path)
    assert step == 7
    assert same(policy.parameters, trainer.policy.parameters)


_SAVE_FOR_EVER = """
import os
import sys
from pathlib import Path
from replaybuf.demo.grpo import Trainer
from replaybuf.demo.weights import Saved, save_trainer
trainer = Trainer.create(0)
for _ in sys.stdin:
    child = os.fork()  # once more, without importing everything again
    while child == 0:
        trainer.step += 1
        save_trainer(Path(sys.argv[1]), Saved(trainer, 0))
    print(child, flush=True)
    os.waitpid(child, 0)
"""


def test_kill_9_during_saves_leaves_complete_weights(tmp_path):
    command = [sys.executable, "-c", _SAVE_FOR_EVER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        for _ in range(5):
            server.stdin.write("save\n")
            server.stdin.flush()
            writer, steps = int(server.stdout.readline()), []
            deadline = time.monotonic() + 20
            try:
                while len(steps) < 5 and time.monotonic() < deadline:
                    if (found := load_policy(tmp_path)) is not None and found[1] not in steps[-1:]:
                        steps.append(found[1])
            finally:
                os.kill(writer, signal.SIGKILL)
            assert len(steps) == 5
            assert load_trainer(tmp_path).step >= steps[-1]
