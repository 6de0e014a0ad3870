"""docs/metrics.md and the names in docs/reference.md are true.

`REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/observe/test_page.py` writes the outputs anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

from replaybuf import NotReadyError, ReplayBufferConfig
from replaybuf.buffer.metrics import flatten
from replaybuf.values.rollouts.rollout import Status
from replaybuf.view.metrics.catalogue import OF_DATABASE
from replaybuf.view.metrics.completions import KINDS, NAMES
from tests.observe.test_spans import group
from tests.pages import DOCS, Page

PAGE = Page("metrics.md")
NAMES_PAGE = (DOCS / "reference.md").read_text("utf-8")


def test_the_examples_print_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order: they go on with one run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    assert len(PAGE.examples) == PAGE.text.count("```python") - 1 == 5
    for code, output in PAGE.examples:
        PAGE.check(code, output)


def section(begin: str, end: str = "\n## ") -> str:
    return PAGE.text[PAGE.text.index(begin) :].split(end, 1)[0]


def test_the_metrics_without_the_label_of_a_buffer_are_named() -> None:
    said = NAMES_PAGE.partition("but for")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", said) == [metric.name for metric in OF_DATABASE]


async def test_every_name_of_a_logger_is_in_the_reference() -> None:
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        await buffer.put(group(), "math")
        with pytest.raises(NotReadyError):
            await buffer.take_batch({"math": 2}, timeout=0.01)
        names = set(flatten(await buffer.metrics()))
    statuses = "|".join(Status)
    names = {re.sub(rf"/buffered/({statuses})$", "/buffered/STATUS", name) for name in names}
    names = {re.sub("^waits/(groups|room)/", "waits/KIND/", name) for name in names}
    assert _loggers_names() == {name.replace("/math/", "/TASK/") for name in names}


def _loggers_names() -> set[str]:
    """Return the names for a logger in the reference; `min` after a name is that name with another end."""
    found = set()
    for cell in re.findall(r"(?m)^\| (`.*?`) \|", NAMES_PAGE):
        first, *others = re.findall(r"`(\S+?)`", cell)
        stem = first.removesuffix("/STATUS").rpartition("/")[0]
        found |= {first, *(f"{stem}/{name}" for name in others)}
    return found


def test_every_name_of_a_batch_is_on_the_page() -> None:
    told = set(re.findall(r"\bbatch/\w+/[\w/]+", PAGE.text))
    assert told == {f"batch/{kind}/{name}" for kind in KINDS for name in NAMES}


async def test_every_span_and_attribute_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    async with ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db").build() as buffer:
        for _ in range(4):
            await buffer.put(group(), "math", model_step=3, current_train_step=4)
        await buffer.take_batch({"math": 1}, current_train_step=4)
        with pytest.raises(NotReadyError):
            await buffer.take_batch({"code": 1}, timeout=0.2)
        async with buffer.lease_batch({"math": 2}) as lease:
            one, other = (item.uid for item in lease.items["math"])
            await lease.save(group(), "math", replaces=[one])
            await lease.finish(group(), "math", replaces=[other])
        await (await buffer.lease_batch({"math": 1})).give_back(failed="no")
        await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=5)
        await buffer.checkpoint(5)
        await buffer.restore(5)
    finished = memory.get_finished_spans()
    attributes = {name for span in finished for name in span.attributes or {}} | {"replaybuf.cancelled"}
    told = set(re.findall(r"`(replaybuf\.[a-z_]+)`", section("| span |")))
    assert told == {span.name for span in finished} | attributes
