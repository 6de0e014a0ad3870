"""The demo: runs, and runs that are killed."""

import os
import random
import re
import shlex
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import make_url

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.cli.demo.worker import BATCH_GROUPS, TASK, buffer_config
from tests.demo.running import ROOT, Demo, assert_trained_once, is_alive, run_demo, saved_step, wait_until
from tests.postgres import new_url
from tests.scripts import Program

PASSWORD = "s3cret-w0rd"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PGPASSWORD": PASSWORD}


@dataclass
class Ended:
    """A run of five steps that was killed and interrupted before its end: where it was, and what it said."""

    folder: Path
    url: str
    interrupted: tuple[str, int]
    last: tuple[str, int]


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def ended(request, tmp_path_factory):
    """By `kill -9` of the trainer, and by Ctrl-C; others have a group of the same task in its database."""
    folder = tmp_path_factory.mktemp("demo")
    for url in new_url(request.param, request, folder):
        with ReplayBufferConfig(url=url).build_sync() as buffer:
            buffer.put([RolloutState(message=[], status=Status.COMPLETED)], TASK)
        if request.param == "postgresql":  # the server of the tests doesn't ask for a password
            url = make_url(url).set(password=PASSWORD).render_as_string(hide_password=False)
        with Demo(folder, url, "--steps", "5") as demo:
            workers = demo.worker_pids()
            demo.wait_for_step(1)
            demo.kill()
            wait_until(lambda pids=workers: not any(map(is_alive, pids)), 120)
        with Demo(folder, url, "--workers", "1", "--steps", "5") as demo:
            workers = demo.worker_pids()
            demo.wait_for_step(2)
            demo.process.send_signal(signal.SIGINT)
            interrupted = demo.end()
        assert not any(map(is_alive, workers))
        yield Ended(folder, url, interrupted, run_demo(folder, url, "--workers", "1", "--steps", "5"))


def test_a_run_that_was_killed_and_interrupted_goes_on_and_trains_each_prompt_once(ended):
    """Groups of others in the same database stay, also those of the demo's own task."""
    output, code = ended.interrupted
    assert code == 130, output
    assert output.endswith("Stopped. Run the same command again to go on from here.\n")
    assert "Traceback" not in output
    output, code = ended.last
    assert code == 0, output
    assert_trained_once(ended.folder, 5, output)
    for config, status, groups in (
        (buffer_config(ended.url), Status.ARCHIVED, 5 * BATCH_GROUPS),
        (ReplayBufferConfig(url=ended.url), Status.COMPLETED, 1),
    ):
        with config.build_sync() as buffer:
            assert buffer.count(TASK, status) == groups


def test_a_run_ends_with_commands_that_work_and_shows_no_password(ended):
    output, _ = ended.last
    assert re.search(r"Mean reward 0\.\d\d -> 0\.\d\d in 5 steps \((\d of them now, in )?\d+ s\)\n", output)
    assert re.findall(r"^step \d/5: reward 0\.\d\d; groups trained \d+; ", output, re.MULTILINE)
    assert "\x1b" not in output
    assert PASSWORD not in output
    assert "***" not in output  # nobody can paste that
    assert ("(with PGPASSWORD)" in output) == (PASSWORD in ended.url)
    assert not any(PASSWORD in path.read_text("latin-1") for path in ended.folder.glob("*.run/*"))
    looks = re.findall(r"^  (replaybuf .*)$", output, re.MULTILINE)
    assert [line.split()[1] for line in looks] == ["trace", "why", "show", "serve"]
    for line in looks[:3]:
        with Program("-m", *shlex.split(line), cwd=ended.folder, env=ENVIRONMENT) as command:
            printed, _ = command.communicate()
        assert command.returncode == 0, printed
        assert re.search(r"^ +5 |group \d+, arithmetic|arithmetic +\d", printed, re.MULTILINE), (line, printed)


def on_both(by_default):
    """One database by default, the other in the long form."""
    cases = [db if db == by_default else pytest.param(db, marks=pytest.mark.long) for db in ("sqlite", "postgresql")]
    return pytest.mark.parametrize("shared_url", cases, indirect=True)


def end_of(folder, url, steps):
    """The rest of a run that was killed, to its end."""
    output, code = run_demo(folder, url, "--steps", str(steps))
    assert code == 0, output
    return assert_trained_once(folder, steps, output)


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
            restart = demo.wait_for(rf"\(pid {workers[victim]}\) was killed \(SIGKILL\); started again as pid (\d+)")
            workers[victim] = int(restart[1])
        demo.wait_for_step(steps - 1)
        with suppress(ProcessLookupError):  # the run may be over
            os.kill(workers[0], signal.SIGKILL)
        output, code = demo.end()
    assert code == 0, output
    assert_trained_once(tmp_path, steps, output)
    assert not any(map(is_alive, workers))
