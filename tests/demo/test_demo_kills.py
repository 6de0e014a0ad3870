"""kill -9 of any process of the demo at any moment: in the end each prompt was trained once."""

import os
import random
import signal
import time
from contextlib import suppress

import numpy as np
import pytest

from replaybuf.demo import Mode
from tests.demo.dying import POINTS
from tests.demo.running import Demo, assert_trained_once, is_alive, run_demo, saved_step, wait_until


def killed(*by_default):
    """Every mode on both databases; the cases that aren't these in the long form."""
    cases = [(database, mode) for database in ("sqlite", "postgresql") for mode in Mode]
    marked = [case if case in by_default else pytest.param(*case, marks=pytest.mark.long) for case in cases]
    return pytest.mark.parametrize(("shared_url", "mode"), marked, indirect=["shared_url"])


def end_of(folder, url, mode, steps):
    """The rest of a run that was killed, to its end."""
    output, code = run_demo(folder, url, "--mode", mode, "--steps", str(steps))
    assert code == 0, output
    return assert_trained_once(folder, steps, output)


@killed(("sqlite", Mode.ASYNC))
def test_killed_at_each_point_of_a_step(tmp_path, shared_url, mode):
    for point in POINTS:
        with Demo(tmp_path, shared_url, "--mode", mode, "--steps", "3", dying=point) as demo:
            output, code = demo.end()
        assert code == -signal.SIGKILL, f"{point}: {output}"
        assert "Traceback" not in output
    assert saved_step(tmp_path) == 3
    end_of(tmp_path, shared_url, mode, 3)


@killed(("postgresql", Mode.DISAGGREGATED))
def test_killed_at_random_moments(tmp_path, shared_url, mode):
    chance, steps = random.Random(f"{mode}"), 18
    for _ in range(3):
        before = saved_step(tmp_path)
        with Demo(tmp_path, shared_url, "--mode", mode, "--steps", str(steps)) as demo:
            if chance.random() < 0.5:
                demo.wait_for_step(before + chance.randint(1, 3))
                time.sleep(chance.uniform(0, 0.05))
            else:  # while it starts, creates the database, restores
                moment = time.monotonic() + chance.uniform(0.3, 1.5)
                wait_until(lambda: time.monotonic() > moment or saved_step(tmp_path) > before + 3, 60)  # noqa: B023
            assert demo.process.poll() is None, demo.end()
    assert saved_step(tmp_path) < steps
    end_of(tmp_path, shared_url, mode, steps)


def test_workers_killed_at_random_moments(tmp_path, shared_url):
    chance, steps = random.Random(3), 12
    with Demo(tmp_path, shared_url, "--steps", str(steps)) as demo:
        workers = demo.worker_pids()
        for step in (0, 3, 6):
            demo.wait_for_step(step)
            time.sleep(chance.uniform(0, 0.2))
            victim = chance.randrange(2)
            os.kill(workers[victim], signal.SIGKILL)
            again = demo.wait_for(rf"\(pid {workers[victim]}\) was killed \(SIGKILL\); started again as pid (\d+)")
            workers[victim] = int(again[1])
        demo.wait_for_step(steps - 1)
        with suppress(ProcessLookupError):  # the run may be over
            os.kill(workers[0], signal.SIGKILL)
        output, code = demo.end()
    assert code == 0, output
    assert_trained_once(tmp_path, steps, output)
    assert not any(map(is_alive, workers))


def test_workers_end_when_the_trainer_was_killed(tmp_path, shared_url):
    with Demo(tmp_path, shared_url, "--steps", "5") as demo:
        workers = demo.worker_pids()
        demo.wait_for_step(1)
        demo.kill()
        wait_until(lambda: not any(map(is_alive, workers)), 5)


def test_a_synchronous_run_that_was_killed_ends_with_the_same_weights(tmp_path):
    ends = []
    for name in ("killed", "whole"):
        folder, url = tmp_path / name, f"sqlite:///{tmp_path}/{name}.db"
        folder.mkdir()
        for point in ("with a batch in hand", "between checkpoint and weights") if name == "killed" else ():
            with Demo(folder, url, "--mode", "sync", "--steps", "4", dying=point) as demo:
                demo.end()
        ends.append(end_of(folder, url, Mode.SYNC, 4))
    assert np.array_equal(ends[0].policy.weights, ends[1].policy.weights)
