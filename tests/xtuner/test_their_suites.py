"""xtuner's own tests, run over `replaybuf.integrations.xtuner`: those of its buffer, producers, managers and trainers.

Beside them its rules, and its trainers' config, as they are in the checkout.

`REPLAYBUF_XTUNER` names a checkout of https://github.com/InternLM/xtuner, whose requirements are installed; nothing of
it is changed but the import of its replay buffer. What has to run on a GPU or needs a model's weights is left out.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.integrations.scripts import printed_by
from tests.xtuner.conftest import PROJECT

pytestmark = pytest.mark.frameworks

#: Test files that use the replay buffer, and those of the machinery around it that a buffer could break.
SUITES = [
    "test_replay_buffer",
    "test_producer",
    "test_staleness_policy",
    "test_produce_progress",
    "test_pending_tasks",
    "test_multi_task_agent_loop_manager",
    "test_agent_loop_manager_checkpoint",
    "test_rl_colocate_trainer",
    "test_rl_disaggregated_trainer",
    "test_rl_trainer_checkpoint",
]

_IDENTITY = "it looks at the Python objects that it put; a database gives back equal ones, not the same"

#: The tests that can't hold over any store outside the process, by suite, each with the reason.
CANNOT_HOLD = {
    "test_replay_buffer": {
        "test_common_put_defaults_to_retryable_expired_group": f"{_IDENTITY} (an array `is` the one that was put)",
        "test_common_refresh_staleness_drops_only_non_retryable_expired_groups": f"{_IDENTITY} (after a refresh)",
        "test_refresh_staleness_batches_non_retryable_release_outside_lock": f"{_IDENTITY} (after a refresh)",
    },
    "test_rl_colocate_trainer": {
        "test_fit_accepts_async_strategy_manager_on_colocate_path": "it puts rollouts of a class of its own, without "
        "fields that are declared; a store has to know the class (`rollout_type=`), to make such rollouts again",
    },
}


def failed_in(report: Path) -> dict[str, str]:
    """The tests that failed or broke, each with the beginning of what it said."""
    failed: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for failure in (*case.iter("failure"), *case.iter("error")):
            failed[case.get("name", "").partition(" ")[0]] = (failure.get("message") or "")[:500]
    return failed


def output_of(arguments: list[str], environment: dict[str, str]) -> str:
    return printed_by(arguments, PROJECT, environment).splitlines()[-1]


_TAKES = """
from pydantic import TypeAdapter
from replaybuf.integrations.xtuner import AsyncReplayBufferConfig
from xtuner.v1.train.rl_trainer import RLColocateTrainerConfig
config = AsyncReplayBufferConfig(url="sqlite:///run.db")
field = RLColocateTrainerConfig.model_fields["replay_buffer_config"]
print(TypeAdapter(field.annotation).validate_python(config) is config)
"""


def test_the_rules_are_those_of_their_buffer(theirs: dict[str, str]) -> None:
    assert output_of(["-m", "tests.xtuner.in_xtuner", "600"], theirs) == "[]"


def test_their_trainers_take_the_config(theirs: dict[str, str]) -> None:
    assert output_of(["-c", _TAKES], theirs) == "True"


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_their_suite_passes(
    suite: str,
    database: str,
    checkout: Path,
    theirs: dict[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    url = f"sqlite:///{tmp_path}/theirs.db"
    if database == "postgresql":
        url = request.getfixturevalue("postgres_database")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.xtuner.over_replaybuf"]
    environment = theirs | {"REPLAYBUF_XTUNER_URL": url}
    process = subprocess.run(
        [*command, f"tests/rl/{suite}.py", f"--junit-xml={report}"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert report.is_file(), process.stdout[-2000:] + process.stderr[-2000:]
    if suite == "test_replay_buffer" and database == "sqlite":
        assert (tmp_path / "theirs.db").is_file(), "the suite ran over xtuner's own buffer"
    failed = failed_in(report)
    assert failed.keys() == CANNOT_HOLD.get(suite, {}).keys(), failed
