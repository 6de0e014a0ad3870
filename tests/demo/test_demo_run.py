"""The demo: runs, and runs that are killed."""

import asyncio
import os
import random
import re
import shlex
import signal
import time
from contextlib import suppress

import pytest
from sqlalchemy import make_url

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.cli.demo.worker import BATCH_GROUPS, TASK, buffer_config
from tests.demo.dying import POINTS
from tests.demo.running import ROOT, RUN, Demo, assert_trained_once, is_alive, run_demo, saved_step, wait_until
from tests.scripts import Program

PASSWORD = "s3cret-w0rd"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PGPASSWORD": PASSWORD}


def count(config, status=Status.COMPLETED):
    async def read():
        async with config.build() as buffer:
            return await buffer.count(TASK, status)

    return asyncio.run(read())


@pytest.fixture
def url(shared_url):
    """A new database; the PostgreSQL URL has a password, which the server of the tests doesn't ask for."""
    if shared_url.startswith("sqlite"):
        return shared_url
    return make_url(shared_url).set(password=PASSWORD).render_as_string(hide_password=False)


def test_a_short_run_trains_each_prompt_once_and_ends_with_commands_that_work(tmp_path, url):
    """Groups of others in the same database stay, also those of the demo's own task."""

    async def put():
        async with ReplayBufferConfig(url=url).build() as buffer:
            await buffer.put([RolloutState(message=[], status=Status.COMPLETED)], TASK)

    asyncio.run(put())
    output, code = run_demo(tmp_path, url, "--steps", "2")
    assert code == 0, output
    assert_trained_once(tmp_path, 2, output)
    assert re.search(r"Mean reward 0\.\d\d -> 0\.\d\d in 2 steps \(\d+ s\)\n", output)
    assert len(re.findall(r"^step [12]/2: reward 0\.\d\d; groups trained \d+; ", output, re.MULTILINE)) == 2
    assert "\x1b" not in output
    assert PASSWORD not in output
    assert "***" not in output  # nobody can paste that
    assert ("(with PGPASSWORD)" in output) == (PASSWORD in url)
    assert not any(PASSWORD in path.read_text("latin-1") for path in (tmp_path / RUN).iterdir())
    assert count(buffer_config(url), Status.ARCHIVED) == 2 * BATCH_GROUPS
    looks = re.findall(r"^  (replaybuf .*)$", output, re.MULTILINE)
    assert [line.split()[1] for line in looks] == ["trace", "why", "show", "serve"]
    for line in looks[:3]:
        with Program("-m", *shlex.split(line), cwd=tmp_path, env=ENVIRONMENT) as command:
            printed, _ = command.communicate()
        assert command.returncode == 0, printed
        assert re.search(r"\d", printed), line
    assert count(ReplayBufferConfig(url=url)) == 1


def test_a_run_that_was_killed_and_interrupted_goes_on(tmp_path):
    """After `kill -9` of the trainer, and after Ctrl-C; its workers end with it, and each prompt is trained once."""
    url = f"sqlite:///{tmp_path}/demo.db"
    with Demo(tmp_path, url, "--steps", "5") as demo:
        workers = demo.worker_pids()
        demo.wait_for_step(1)
        demo.kill()
        wait_until(lambda: not any(map(is_alive, workers)), 120)
    with Demo(tmp_path, url, "--workers", "1", "--steps", "5") as demo:
        workers = demo.worker_pids()
        demo.wait_for_step(2)
        demo.process.send_signal(signal.SIGINT)
        output, code = demo.end()
    assert code == 130, output
    assert output.endswith("Stopped. Run the same command again to go on from here.\n")
    assert "Traceback" not in output
    assert not any(map(is_alive, workers))
    end_of(tmp_path, url, 5)


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
