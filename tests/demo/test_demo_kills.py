"""kill -9 of any process of the demo at any moment: in the end each prompt was trained once."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest

from tests.demo.dying import POINTS
from tests.demo.running import Demo, assert_trained_once, is_alive, run_demo, saved_step, wait_until


def on_both(by_default):
    """One database by default, the other in the long form."""
    cases = [
        one if one == by_default else pytest.param(one, marks=pytest.mark.long) for one in ("sqlite", "postgresql")
    ]
    return pytest.mark.parametrize("shared_url", cases, indirect=True)


def end_of(folder, url, steps):
    """The rest of a run that was killed, to its end."""
    output, code = run_demo(folder, url, "--steps", str(steps))
    assert code == 0, output
    return assert_trained_once(folder, steps, output)


@on_both("sqlite")
def test_killed_at_each_point_of_a_step(tmp_path, shared_url):
    for point in POINTS:
        with Demo(tmp_path, shared_url, "--steps", "3", dying=point) as demo:
            output, code = demo.end()
        assert code == -signal.SIGKILL, f"{point}: {output}"
        assert "Traceback" not in output
    assert saved_step(tmp_path) == 1
    end_of(tmp_path, shared_url, 3)


@on_both("postgresql")
def test_killed_at_random_moments(tmp_path, shared_url):
    chance, steps = random.Random("disaggregated"), 18
    for _ in range(3):
        before = saved_step(tmp_path)
        with Demo(tmp_path, shared_url, "--steps", str(steps)) as demo:
            if chance.random() < 0.5:
                demo.wait_for_step(before + chance.randint(1, 3))
                time.sleep(chance.uniform(0, 0.05))
            else:  # while it starts, creates the database, restores
                moment = time.monotonic() + chance.uniform(0.3, 1.5)
                wait_until(lambda: time.monotonic() > moment or saved_step(tmp_path) > before + 3, 60)  # noqa: B023
            assert demo.process.poll() is None, demo.end()
    assert saved_step(tmp_path) < steps
    end_of(tmp_path, shared_url, steps)


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
