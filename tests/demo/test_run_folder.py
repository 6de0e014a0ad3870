"""What a run keeps beside the buffer: what is read is the newest complete save."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from replaybuf import ReplayBufError
from replaybuf.demo.policy import Policy
from replaybuf.demo.run_folder import Run, RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture
def run() -> Run:
    policy = Policy.create()
    policy.weights[3] = 0.5
    return Run(policy, seed=3, step=7, target=9, trained=[4, 2, 9], rewards=[0.1, 0.25])


def test_two_trainers_cant_share_a_folder(folder: RunFolder) -> None:
    with folder.locked(), pytest.raises(ReplayBufError, match="another demo is running"), folder.locked():
        pass
    with folder.locked():  # free again
        pass


def test_a_folder_that_cant_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ReplayBufError, match="can't write to the run folder"), RunFolder(tmp_path / "file").locked():
        pass


def targets(run: Run, *steps: tuple[int, int]) -> list[int]:
    found = []
    for run.step, wanted in steps:
        run.aim(wanted)
        found.append(run.target)
    return found


def test_a_run_goes_to_its_steps_and_when_it_has_ended_as_many_more() -> None:
    run = Run(Policy.create(), 0)
    assert targets(run, (0, 200), (57, 200), (199, 200)) == [200] * 3
    run.finished = True
    assert targets(run, (200, 200), (250, 200), (400, 200)) == [400] * 3
    run.finished = True
    assert targets(run, (400, 100)) == [500]
    assert targets(Run(Policy.create(), 0), (0, 200), (200, 200)) == [200, 200]  # killed at its end
    assert targets(Run(Policy.create(), 0), (0, 5), (3, 10)) == [5, 10]


def test_a_run_comes_back_as_it_was_saved(folder: RunFolder, run: Run) -> None:
    assert folder.load() is None
    folder.finish(run)
    loaded = folder.load()
    assert loaded is not None
    assert np.array_equal(loaded.policy.weights, run.policy.weights)
    assert np.array_equal(loaded.policy.squares, run.policy.squares)
    assert {**vars(loaded), "policy": run.policy, "finished": True} == vars(run)


def test_clear_removes_all_but_the_lock(folder: RunFolder, run: Run) -> None:
    with folder.locked():
        folder.save(run)
        folder.log(0).touch()
        folder.clear()
        assert [path.name for path in folder.path.iterdir()] == ["lock"]


def test_a_half_written_save_is_not_seen(folder: RunFolder, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.save(run)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    run.step = 8
    with pytest.raises(OSError, match="disk full"):
        folder.save(run)
    assert folder.load().step == 7
    assert [path.name for path in folder.path.iterdir()] == ["weights.npz"]


def test_a_spoilt_file_is_a_clear_error(folder: RunFolder, run: Run) -> None:
    folder.save(run)
    folder.weights.write_bytes(folder.weights.read_bytes()[:100])
    with pytest.raises(ReplayBufError, match=r"weights\.npz can't be read"):
        folder.load()


def test_pickled_arrays_are_refused(folder: RunFolder, run: Run) -> None:
    folder.save(run)
    with np.load(folder.weights) as saved:
        arrays = dict(saved)
    file = io.BytesIO()
    np.savez(file, **(arrays | {"step": np.array([{"a": 1}], dtype=object)}))
    folder.weights.write_bytes(file.getvalue())
    with pytest.raises(ReplayBufError, match="can't be read"):
        folder.load()


def test_weights_of_another_demo_are_a_clear_error(folder: RunFolder) -> None:
    np.savez(folder.weights, allow_pickle=False, step=3, seed=0, updates=3)
    with pytest.raises(ReplayBufError, match=r"another version of the demo.*--fresh"):
        folder.load()


_SAVE_FOR_EVER = """
import os
import sys
from pathlib import Path
from replaybuf.demo.policy import Policy
from replaybuf.demo.run_folder import Run, RunFolder
run, folder = Run(Policy.create(), 0), RunFolder(Path(sys.argv[1]))
for _ in sys.stdin:
    child = os.fork()  # once more, without importing everything again
    while child == 0:
        run.step += 1
        folder.save(run)
    print(child, flush=True)
    os.waitpid(child, 0)
"""


def test_kill_9_during_saves_leaves_complete_weights(folder: RunFolder) -> None:
    command = [sys.executable, "-c", _SAVE_FOR_EVER, str(folder.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        for _ in range(5):
            server.stdin.write("save\n")
            server.stdin.flush()
            writer, steps = int(server.stdout.readline()), []
            deadline = time.monotonic() + 20
            try:
                while len(steps) < 5 and time.monotonic() < deadline:
                    if (found := folder.load()) is not None and found.step not in steps[-1:]:
                        steps.append(found.step)
            finally:
                os.kill(writer, signal.SIGKILL)
            assert len(steps) == 5
            assert folder.load().step >= steps[-1]
