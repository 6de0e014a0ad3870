"""Spans, and what an OpenTelemetry collector gets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from replaybuf import FullError, LeaseLostError, NotReadyError, ReplayBuffer, ReplayBufferConfig, RolloutState, Status
from replaybuf.errors import InputError, RolloutError
from tests.pages import Page
from tests.scripts import run

SECRET = "the prompt that nobody else may read"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What spans are exported to. The provider is the application's for this test only."""
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return memory


@pytest.fixture
async def buffer(tmp_path: Path, exporter: InMemorySpanExporter) -> AsyncIterator[ReplayBuffer[Any]]:
    config = ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db", name="train", capacity=8, on_full="block")
    async with config.build() as opened:
        yield opened


def numbers(families: Iterable[Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the numbers by series and labels, of which no two are the same."""
    samples = [sample for family in families for sample in family.samples]
    values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(values) == len(samples)
    return values


def group(size: int = 2) -> list[RolloutState]:
    return [
        RolloutState(
            message=[{"role": "user", "content": SECRET}],
            response=SECRET,
            response_ids=[1, 2],
            status=Status.COMPLETED,
        )
        for _ in range(size)
    ]


def spans(exporter: InMemorySpanExporter) -> Iterator[tuple[str, dict[str, Any], ReadableSpan]]:
    for span in exporter.get_finished_spans():
        attributes = {name.removeprefix("replaybuf."): value for name, value in (span.attributes or {}).items()}
        yield span.name.removeprefix("replaybuf."), attributes, span


PAGE = Page("metrics.md")


async def test_every_call_is_a_span_with_what_it_did(buffer: ReplayBuffer[Any], exporter: InMemorySpanExporter) -> None:
    """And all names of spans and attributes are on the page."""
    for _ in range(4):
        await buffer.put(group(), "math", model_step=3, current_train_step=4)
    await buffer.take_batch({"math": 1, "code": 2}, current_train_step=4)
    async with buffer.lease_batch({"math": 2}) as lease:
        item, other = lease.items["math"]
        await lease.save(group(), "math", replaces=[other.uid])
        await lease.finish(group(), "math", replaces=[item.uid])
    lease = await buffer.lease_batch({"math": 1})
    await lease.give_back(failed="no")
    await buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=9)
    await buffer.checkpoint(9)
    await buffer.restore(9)
    with pytest.raises(NotReadyError):
        await buffer.take_batch({"code": 1}, timeout=0.5)

    recorded = list(spans(exporter))
    assert [name for name, _, _ in recorded] == [
        *("put", "put", "put", "put", "take", "lease", "save", "finish", "acknowledge", "lease"),
        *("give_back", "refresh_staleness", "checkpoint", "restore", "wait", "take"),
    ]
    assert all(attributes["buffer"] == "train" for name, attributes, _ in recorded if name != "wait")
    names = {span.name for span in exporter.get_finished_spans()}
    names |= {name for span in exporter.get_finished_spans() for name in span.attributes or {}}
    table = PAGE.text[PAGE.text.index("| span |") :].partition("\n## ")[0]
    assert set(re.findall(r"`(replaybuf\.[a-z_]+)`", table)) == names | {"replaybuf.cancelled"}
    values = {name: attributes for name, attributes, _ in recorded}
    assert values["put"].items() >= {"task": "math", "rollouts": 2, "model_step": 3, "train_step": 4, "uid": 4}.items()
    of_take = next(attributes for name, attributes, _ in recorded if name == "take")
    assert of_take.items() >= {"tasks": ("math", "code"), "sizes": (1, 2), "groups": 1, "replayed": 0}.items()
    assert values["lease"].items() >= {"groups": 1, "lease": lease.token}.items()
    assert values["finish"].items() >= {"task": "math", "rollouts": 2}.items()
    assert values["acknowledge"]["groups"] == 1
    assert values["give_back"].items() >= {"groups": 1, "failed": True}.items()
    assert values["refresh_staleness"].items() >= {"train_step": 9, "expired": 1, "tasks": ("math",)}.items()
    assert values["checkpoint"].items() >= {"train_step": 9, "groups": 2}.items()
    assert values["restore"].items() >= {"train_step": 9, "keep_new": False}.items()


async def test_a_wait_is_a_span_below_its_call(buffer: ReplayBuffer[Any], exporter: InMemorySpanExporter) -> None:
    with pytest.raises(NotReadyError):
        await buffer.take_batch({"math": 1}, timeout=0.05)
    for _ in range(8):
        await buffer.put(group(), "math")
    with pytest.raises(FullError):
        await buffer.put(group(), "math", timeout=0.05)
    recorded = [
        (name, attributes, span)
        for name, attributes, span in spans(exporter)
        if span.status.status_code.name == "ERROR"
    ]
    assert [(name, attributes.get("kind")) for name, attributes, _ in recorded] == [
        ("wait", "groups"), ("take", None), ("wait", "room"), ("put", None)]  # fmt: skip
    for (_, _, wait), (_, _, call) in (recorded[:2], recorded[2:]):
        assert wait.parent is not None
        assert wait.parent.span_id == call.context.span_id
        assert wait.end_time - wait.start_time > 0.01e9  # type: ignore[operator]


async def test_a_call_is_below_the_span_of_its_caller(
    buffer: ReplayBuffer[Any], exporter: InMemorySpanExporter
) -> None:
    with trace.get_tracer("trainer").start_as_current_span("step"):
        await buffer.put(group(), "math")
    [put_span, step_span] = exporter.get_finished_spans()
    assert put_span.parent is not None
    assert put_span.parent.span_id == step_span.context.span_id


def test_a_synchronous_call_is_below_the_span_of_its_caller(exporter: InMemorySpanExporter) -> None:
    with ReplayBufferConfig(url="memory://").build_sync() as buffer:
        with trace.get_tracer("trainer").start_as_current_span("step"):
            buffer.put(group(), "math")
        [put_span, step_span] = exporter.get_finished_spans()
    assert put_span.parent is not None
    assert put_span.parent.span_id == step_span.context.span_id


async def test_errors_are_told_without_what_rollouts_hold(
    buffer: ReplayBuffer[Any], exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(RolloutError):
        await buffer.put([*group(), {"response": SECRET}], "math")
    with pytest.raises(InputError):
        await buffer.put(group(), "math", tags={SECRET: object()})  # type: ignore[dict-item]
    with pytest.raises(RolloutError):
        await buffer.put(3, "math")  # type: ignore[arg-type]
    await buffer.put(group(), "math")
    lease = await buffer.lease_batch({"math": 1})
    await lease.give_back()
    with pytest.raises(LeaseLostError):
        await lease.acknowledge()
    failed_spans = [span for _, _, span in spans(exporter) if span.events]
    assert [(span.name, span.events[0].attributes["exception.type"]) for span in failed_spans] == [
        ("replaybuf.put", "RolloutError"),
        ("replaybuf.put", "InputError"),
        ("replaybuf.put", "RolloutError"),
        ("replaybuf.acknowledge", "LeaseLostError"),
    ]
    assert "were given back" in failed_spans[-1].status.description
    assert not [span for span in exporter.get_finished_spans() if SECRET in span.to_json()]


async def test_a_cancelled_call_is_no_error(buffer: ReplayBuffer[Any], exporter: InMemorySpanExporter) -> None:
    task = asyncio.create_task(buffer.take_batch({"math": 1}, timeout=60))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    recorded = [
        (name, attributes["cancelled"], span.status.status_code.name) for name, attributes, span in spans(exporter)
    ]
    assert recorded == [("wait", True, "UNSET"), ("take", True, "UNSET")]


@pytest.mark.parametrize("when", ["on_start", "on_end"])
async def test_tracing_that_fails_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object, *args: object, **options: object) -> None:
        raise RuntimeError("no collector")

    provider = TracerProvider()
    provider.add_span_processor(type("Failing", (SpanProcessor,), {when: fail})())
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    async with ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db").build() as buffer:
        await buffer.put(group(), "math")
        batch, _ = await buffer.take_batch({"math": 1}, timeout=5)
        assert len(batch["math"]) == 1
        with pytest.raises(NotReadyError):
            await buffer.take_batch({"math": 1}, timeout=0.05)
    assert "a span was lost" in caplog.text


def test_nothing_imports_opentelemetry() -> None:
    code = (
        "import sys, asyncio\nfrom replaybuf import ReplayBufferConfig\n"
        "with ReplayBufferConfig(url='memory://').build_sync() as buffer: buffer.take_batch({'math': 1})\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    assert run(code) == ""


async def test_without_a_provider_there_is_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    async with ReplayBufferConfig(url="memory://").build() as buffer:
        await buffer.put(group(), "math")
        assert not trace.get_current_span().get_span_context().is_valid
