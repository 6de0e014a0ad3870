"""docs/production.md names what there is."""

from __future__ import annotations

import dataclasses
import re

import pytest

import replaybuf.produce
from replaybuf.produce import AsyncProduceStrategy, ProduceStrategy, ProduceSummary, SyncProduceStrategy
from tests.pages import Page

PAGE = Page("production.md")


def section(page: Page, begin: str, end: str) -> str:
    return page.text[page.text.index(begin) :].split(end, 1)[0]


@pytest.mark.parametrize("strategy", [ProduceStrategy, AsyncProduceStrategy])
def test_the_docstring_of_a_strategy_names_its_settings(strategy: type[ProduceStrategy]) -> None:
    told = set(re.findall(r"`(\w+)\b", strategy.__doc__ or ""))
    own = [name for name in strategy.model_fields if name in strategy.__annotations__]
    assert [name for name in own if name not in told] == []


def test_the_synchronous_strategy_has_no_settings_of_its_own() -> None:
    assert list(SyncProduceStrategy.model_fields) == list(ProduceStrategy.model_fields)


def test_the_summary_says_what_its_figures_are() -> None:
    told = re.findall(r"`(\w+)`", ProduceSummary.__doc__ or "")
    assert {field.name for field in dataclasses.fields(ProduceSummary)} - {"times"} <= set(told)


@pytest.mark.parametrize(("n", "sync_weights_interval"), [(0, 1), (1, 1), (0, 4), (2, 4)])
def test_the_steps_that_staleness_allows(n: int, sync_weights_interval: int) -> None:
    strategy = AsyncProduceStrategy(max_staleness=n, sync_weights_interval=sync_weights_interval)
    [steps] = re.findall(r"`max_staleness=n` allows `(.*?)` train steps", PAGE.text)
    model_step = 100  # a token of these weights is 0 steps old in the train step after it
    train_step = model_step + 1 + eval(steps)
    assert not strategy.too_old(model_step, train_step)
    assert strategy.too_old(model_step, train_step + 1)


def test_the_names_for_users_of_xtuner_exist() -> None:
    rows = re.findall(r"(?m)^\| .*? \| (.*?) \|$", section(Page("xtuner.md"), "| xtuner | replaybuf |", "\n\n"))
    called = {name for row in rows for name in re.findall(r"`(\w+)(?=[(`.])", row)}
    known = {*replaybuf.produce.__all__, *AsyncProduceStrategy.model_fields}
    assert {name for name in called if name[0].isupper()} - {"None"} <= known
    assert {"over_sample", "is_valid", "should_continue", "produce_loop", "publish"} <= called & known
    for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)", " ".join(rows)):
        assert hasattr(getattr(replaybuf.produce, owner), member)


def test_the_pages_name_every_script() -> None:
    texts = [path.read_text("utf-8") for path in PAGE.path.parent.glob("*.md")]
    named = {name for text in texts for name in re.findall(r"docs/examples/\w+\.\w+", text)}
    assert {PAGE.path.parents[1] / name for name in named} == {*(PAGE.path.parent / "examples").glob("*.*")}
