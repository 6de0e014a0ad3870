"""`replaybuf demo` as people run it: real processes, both databases, a terminal."""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from sqlalchemy import make_url

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.cli.demo.worker import BATCH_GROUPS, TASK, buffer_config
from tests.demo.running import ROOT, RUN, Demo, assert_trained_once, is_alive, run_demo

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
    output, code = run_demo(tmp_path, url, "--steps", "4")
    assert code == 0, output
    assert_trained_once(tmp_path, 4, output)
    assert re.search(r"Mean reward 0\.\d\d -> 0\.\d\d in 4 steps \(4 of them now, in \d+ s\)\n", output)
    assert len(re.findall(r"^step [1-4]/4: reward 0\.\d\d; groups trained \d+; ", output, re.MULTILINE)) == 4
    assert "\x1b" not in output
    assert PASSWORD not in output
    assert "***" not in output  # nobody can paste that
    assert ("(with PGPASSWORD)" in output) == (PASSWORD in url)
    assert not any(PASSWORD in path.read_text("latin-1") for path in (tmp_path / RUN).iterdir())
    assert count(buffer_config(url), Status.ARCHIVED) == 4 * BATCH_GROUPS
    looks = re.findall(r"^  (replaybuf .*)$", output, re.MULTILINE)
    assert [line.split()[1] for line in looks] == ["trace", "why", "show", "serve"]
    for line in looks[:3]:
        command = [sys.executable, "-m", *shlex.split(line)]
        done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), line
        assert re.search(r"\d", done.stdout), line


def test_groups_of_others_in_the_same_database_stay(tmp_path, shared_url):
    """Also those of the demo's own task."""

    async def put():
        async with ReplayBufferConfig(url=shared_url).build() as buffer:
            await buffer.put([RolloutState(message=[], status=Status.COMPLETED)], TASK)

    asyncio.run(put())
    output, code = run_demo(tmp_path, shared_url, "--steps", "1")
    assert code == 0, output
    assert count(ReplayBufferConfig(url=shared_url)) == 1


def test_a_run_may_be_cut_short_and_prolonged(tmp_path, shared_url):
    """More prompts were drawn than the shorter run needs; they are trained by the longer one."""
    with Demo(tmp_path, shared_url, "--steps", "50") as demo:
        demo.wait_for_step(2)
    output, code = run_demo(tmp_path, shared_url, "--steps", "4")
    assert code == 0, output
    assert "prompts were trained, each of them once." in output or "Each of the 128 prompts" in output
    output, code = run_demo(tmp_path, shared_url, "--steps", "8", "--workers", "1")
    assert code == 0, output
    assert_trained_once(tmp_path, 8, output)


def test_ctrl_c_ends_the_run_and_says_how_to_go_on(tmp_path):
    url = f"sqlite:///{tmp_path}/demo.db"
    with Demo(tmp_path, url, "--workers", "1", "--steps", "5") as demo:
        workers = demo.worker_pids()
        demo.wait_for_step(1)
        demo.process.send_signal(signal.SIGINT)
        output, code = demo.end()
    assert code == 130, output
    assert output.endswith("Stopped. Run the same command again to go on from here.\n")
    assert "Traceback" not in output
    assert not any(map(is_alive, workers))
    output, code = run_demo(tmp_path, url, "--steps", "5")
    assert code == 0, output
    assert_trained_once(tmp_path, 5, output)


def test_the_reward_rises(tmp_path):
    output, code = run_demo(tmp_path, f"sqlite:///{tmp_path}/demo.db", "--steps", "60")
    assert code == 0, output
    first, last = re.search(r"Mean reward (\S+) -> (\S+) in 60 steps", output).groups()
    assert float(first) < 0.1
    assert float(last) > 0.15
