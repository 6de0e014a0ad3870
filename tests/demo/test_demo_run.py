"""`replaybuf demo` as people run it: real processes, both databases, all modes."""

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest
from sqlalchemy import make_url

from replaybuf import Status
from replaybuf.demo import Mode
from replaybuf.demo.run_folder import BATCH_GROUPS, PAYLOAD_THRESHOLD, TASK, buffer_config
from replaybuf.demo.worker import experts_of
from tests.demo.running import ROOT, RUN, Demo, assert_trained_once, is_alive, run_demo

PASSWORD = "s3cret-w0rd"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PGPASSWORD": PASSWORD}
long = pytest.mark.long
in_every_mode = pytest.mark.parametrize("mode", [Mode.DISAGGREGATED, Mode.ASYNC, pytest.param(Mode.SYNC, marks=long)])


def archived_in(url):
    """How many trained groups of the demo the buffer has."""

    async def count():
        async with buffer_config(url).build() as buffer:
            return await buffer.count(TASK, Status.ARCHIVED)

    return asyncio.run(count())


@pytest.fixture
def url(shared_url):
    """A new database; the PostgreSQL URL has a password, which the server of the tests doesn't ask for."""
    if shared_url.startswith("sqlite"):
        return shared_url
    return make_url(shared_url).set(password=PASSWORD).render_as_string(hide_password=False)


def shell_lines(output):
    return re.findall(r"^  (replaybuf .*)$", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("shared_url", "mode"),
    [
        ("sqlite", Mode.DISAGGREGATED),
        ("postgresql", Mode.ASYNC),
        *(
            pytest.param(database, mode, marks=long)
            for database, mode in [
                ("sqlite", Mode.SYNC),
                ("sqlite", Mode.ASYNC),
                ("postgresql", Mode.SYNC),
                ("postgresql", Mode.DISAGGREGATED),
            ]
        ),
    ],
    indirect=["shared_url"],
)
def test_a_short_run_trains_each_prompt_once_and_ends_with_commands_that_work(tmp_path, url, mode):
    output, code = run_demo(tmp_path, url, "--steps", "4", "--mode", mode)
    assert code == 0, output
    assert_trained_once(tmp_path, 4, output)
    assert re.search(r"Mean reward 0\.\d\d -> 0\.\d\d in 4 steps, \d+ s\n", output)
    assert "\x1b" not in output
    assert PASSWORD not in output
    assert "***" not in output  # nobody can paste that
    assert not any(PASSWORD in path.read_text("latin-1") for path in (tmp_path / RUN).iterdir())
    assert archived_in(url) == 4 * BATCH_GROUPS
    looks = shell_lines(output)
    assert [line.split()[1] for line in looks] == ["trace", "why", "show", "serve"]
    for line in looks[:3]:
        command = [sys.executable, "-m", *shlex.split(line)]
        done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), line
        assert re.search(r"\d", done.stdout), line


@pytest.mark.parametrize("mode", [Mode.SYNC, pytest.param(Mode.DISAGGREGATED, marks=long)])
@pytest.mark.parametrize("shared_url", ["sqlite", pytest.param("postgresql", marks=long)], indirect=True)
def test_a_run_keeps_its_arrays_apart(tmp_path, shared_url, mode):
    """In a folder that it makes; each array of a trained group is the one that a worker has made."""
    output, code = run_demo(tmp_path, shared_url, "--steps", "1", "--payloads", "arrays", "--mode", mode)
    assert code == 0, output
    assert_trained_once(tmp_path, 1, output)
    assert f"; arrays: {tmp_path / 'arrays'}" in output
    [look] = [line for line in shell_lines(output) if line.split()[1] == "sql"]
    command = [sys.executable, "-m", *shlex.split(look), "--format=json"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, check=True)
    [place] = json.loads(done.stdout)
    assert place["bytes"] > BATCH_GROUPS * PAYLOAD_THRESHOLD
    for group in trained_in(shared_url):
        for rollout in group:
            expected = experts_of([*rollout.prompt_ids, *rollout.response_ids])
            assert np.array_equal(rollout.routed_experts, expected)


def trained_in(url):
    """The trained groups of the demo."""

    async def read():
        async with buffer_config(url).build() as buffer:
            return [item.item async for item in buffer.find({"status": Status.ARCHIVED})]

    return asyncio.run(read())


def test_a_run_goes_on_in_another_mode(tmp_path, shared_url):
    """Each time for as many steps more."""
    for number, mode in enumerate([Mode.DISAGGREGATED, Mode.ASYNC, Mode.SYNC], 1):
        output, code = run_demo(tmp_path, shared_url, "--steps", "2", "--mode", mode)
        assert code == 0, output
        assert_trained_once(tmp_path, 2 * number, output)


def test_a_run_may_be_cut_short_and_prolonged(tmp_path, shared_url):
    """More prompts were drawn than the shorter run needs; they are trained by the longer one."""
    with Demo(tmp_path, shared_url, "--steps", "50") as demo:
        demo.wait_for_step(2)
    output, code = run_demo(tmp_path, shared_url, "--steps", "4")
    assert code == 0, output
    assert "prompts were trained, each of them once." in output or "Each of the 128 prompts" in output
    output, code = run_demo(tmp_path, shared_url, "--steps", "8", "--mode", "async")
    assert code == 0, output
    assert_trained_once(tmp_path, 8, output)


def test_fresh_begins_anew(tmp_path, shared_url):
    with Demo(tmp_path, shared_url, "--steps", "50", "--seed", "1") as demo:
        demo.wait_for_step(1)
    output, code = run_demo(tmp_path, shared_url, "--steps", "2", "--seed", "2", "--fresh")
    assert code == 0, output
    assert "Training a new policy for 2 steps (seed 2)" in output
    assert assert_trained_once(tmp_path, 2, output).seed == 2


@in_every_mode
def test_ctrl_c_ends_the_run_and_says_how_to_go_on(tmp_path, mode):
    url = f"sqlite:///{tmp_path}/demo.db"
    with Demo(tmp_path, url, "--workers", "1", "--mode", mode, "--steps", "5") as demo:
        workers = demo.worker_pids() if mode == Mode.DISAGGREGATED else []
        demo.wait_for_step(1)
        demo.process.send_signal(signal.SIGINT)
        output, code = demo.end()
    assert code == 130, output
    assert output.endswith("Stopped. Run the same command again to go on from here.\n")
    assert "Traceback" not in output
    assert not any(map(is_alive, workers))
    output, code = run_demo(tmp_path, url, "--mode", mode, "--steps", "5")
    assert code == 0, output
    assert_trained_once(tmp_path, 5, output)


@pytest.mark.parametrize(
    "mode", [Mode.ASYNC, pytest.param(Mode.SYNC, marks=long), pytest.param(Mode.DISAGGREGATED, marks=long)]
)
def test_the_reward_rises(tmp_path, mode):
    output, code = run_demo(tmp_path, f"sqlite:///{tmp_path}/demo.db", "--steps", "60", "--seed", "1", "--mode", mode)
    assert code == 0, output
    first, last = re.search(r"Mean reward (\S+) -> (\S+) in 60 steps", output).groups()
    assert float(first) < 0.1
    assert float(last) > 0.15
