"""docs/large-runs.md is what its script reckons, and the simulation's arrivals are those of the run."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest

from benchmarks.large_run import RUNS, Seen, arrivals, picture, simulate, table, told
from tests.pages import DOCS

PAGE = (DOCS / "large-runs.md").read_text("utf-8")


def test_the_table_is_the_one_that_the_script_prints() -> None:
    assert table() in PAGE


@pytest.mark.parametrize("name", ["qwen2.5-7b", "agentic"])
def test_groups_arrive_at_the_rate_of_the_run(name: str) -> None:
    """In the long run, whatever the tail of their durations, and in the order of time."""
    run = RUNS[name]
    scale = 3 / run.groups_a_second
    seen = [at for at, _ in itertools.islice(arrivals(run, scale, 0), 6000)]
    assert seen == sorted(seen)
    assert 0.85 < len(seen) / seen[-1] / 3 < 1.15


def test_a_group_takes_as_long_as_its_slowest_rollout() -> None:
    run = RUNS["agentic"]
    took = sorted(took for _, took in itertools.islice(arrivals(run, 1, 0), 2000))
    assert took[0] > 0
    assert took[1000] > 1.5 * run.rollout_seconds  # the slowest of eight
    assert took[-20] > 2 * took[1000]  # a long tail


@pytest.mark.long
async def test_a_simulation_drives_the_store_and_draws_what_it_saw() -> None:
    run = RUNS["qwen2.5-7b"]
    seen = await simulate(run, "sqlite", 0.03, 0.5, experts=False, payloads=None)
    assert len(seen.puts) == len(seen.arrived) > 0
    assert "groups put" in told(run, 0.5, 0.03, seen)
    drawing = ElementTree.fromstring(picture(run, 0.5, 0.03, seen))
    dots = drawing.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(dots) == len(seen.puts)


def test_a_picture_of_nothing_is_one() -> None:
    assert ElementTree.fromstring(picture(RUNS["agentic"], 0.1, 1, Seen())) is not None
