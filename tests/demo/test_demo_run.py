"""`replaybuf demo` as people run it: real processes, both databases, kill -9."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import make_url

import replaybuf
from replaybuf import ReplayBufferConfig, Status
from replaybuf.demo.settings import TASK
from replaybuf.demo.weights import load_trainer

PASSWORD = "s3cret-w0rd"
ROOT = Path(replaybuf.__file__).parents[1]
RUN = "demo.run"


class Demo:
    """One process of the demo, in a folder of its own; leaving the block kills it."""

    def __init__(self, folder, url, *options):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REPLAYBUF_")}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "replaybuf.demo", "--run-dir", RUN, *options],
            cwd=folder,
            env={**environment, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "REPLAYBUF_URL": url},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = []
        self._limit = threading.Timer(90, self.process.kill)
        self._limit.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._limit.cancel()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def wait_for(self, pattern):
        """The first line with this pattern, of those not read yet."""
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        pytest.fail(f"no line with {pattern!r} in: {''.join(self.lines)}")

    def end(self):
        """All output, and the exit code."""
        self.lines += self.process.stdout
        return "".join(self.lines), self.process.wait(timeout=20)

    def worker_pids(self):
        return [int(pid) for pid in self.wait_for(r"Rollout workers: pid ([\d, ]+)")[1].split(", ")]


def run_demo(folder, url, *options):
    """Output and exit code of a whole run."""
    with Demo(folder, url, *options) as demo:
        return demo.end()


def is_alive(pid):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def groups_in(url):
    """How many groups of the demo the buffer has."""

    async def count():
        async with ReplayBufferConfig(url=url).build() as buffer:
            return sum((await buffer.count_statuses([TASK], Status))[TASK].values())

    return asyncio.run(count())


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """A new database; the PostgreSQL URL has a password, which the server of the tests doesn't ask for."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/demo.db"
    database = request.getfixturevalue("postgres_database")
    return make_url(database).set(password=PASSWORD).render_as_string(hide_password=False)


def shell_lines(output):
    return re.findall(r"^  ((?:sqlite3|psql) .*)$", output, re.MULTILINE)


def test_a_short_run_ends_with_a_summary_and_sql_that_works(tmp_path, url):
    output, code = run_demo(tmp_path, url, "--steps", "4")
    assert code == 0, output
    assert re.search(r"Mean reward 0\.\d\d -> 0\.\d\d in 4 steps, \d+ s\n", output)
    assert "\x1b" not in output
    assert PASSWORD not in output
    assert "***" not in output  # nobody can paste that
    assert not any(PASSWORD in path.read_text("latin-1") for path in (tmp_path / RUN).iterdir())
    assert groups_in(url) >= 32
    for line in shell_lines(output):
        if shutil.which(line.split()[0]) is not None:
            result = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert (result.returncode, result.stderr) == (0, ""), line
            assert re.search(r"\d", result.stdout), line


def test_kill_9_of_any_process_and_the_run_goes_on(tmp_path, url):
    with Demo(tmp_path, url, "--steps", "2000") as demo:
        workers = demo.worker_pids()
        wait_until(lambda: (tmp_path / RUN / "rewards.txt").exists(), 20)
        os.kill(workers[0], signal.SIGKILL)
        workers[0] = int(demo.wait_for(rf"\(pid {workers[0]}\) was killed \(SIGKILL\); started again as pid (\d+)")[1])
        step = load_trainer(tmp_path / RUN)[0].step
        wait_until(lambda: load_trainer(tmp_path / RUN)[0].step >= step + 5, 20)
        demo.process.kill()
        demo.process.wait()
        wait_until(lambda: not any(map(is_alive, workers)), 3)
    step, groups = load_trainer(tmp_path / RUN)[0].step, groups_in(url)
    output, code = run_demo(tmp_path, url, "--steps", str(step + 2))
    assert code == 0, output
    assert f"Resuming at step {step} with {groups} groups in the buffer" in output
    assert f"in {step + 2} steps (the last 2 of them in" in output


def test_ctrl_c_ends_the_run_and_says_how_to_go_on(tmp_path):
    with Demo(tmp_path, f"sqlite:///{tmp_path}/demo.db", "--workers", "1") as demo:
        workers = demo.worker_pids()
        wait_until(lambda: (tmp_path / RUN / "rewards.txt").exists(), 20)
        demo.process.send_signal(signal.SIGINT)
        output, code = demo.end()
    assert code == 130
    assert output.endswith("Stopped. Run the same command again to go on from here.\n")
    assert not any(map(is_alive, workers))


def test_the_reward_rises(tmp_path):
    output, code = run_demo(tmp_path, f"sqlite:///{tmp_path}/demo.db", "--steps", "60", "--seed", "1")
    assert code == 0, output
    first, last = re.search(r"Mean reward (\S+) -> (\S+) in 60 steps", output).groups()
    assert float(first) < 0.1
    assert float(last) > 0.15
