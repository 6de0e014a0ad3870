"""Real prompts, of grade-school mathematics, in frameworks' own formats, through every kind of production."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer, ReplayBufferConfig, RolloutState, Status
from replaybuf.errors import ProduceError
from replaybuf.produce import (
    AsyncProduceStrategy,
    JSONLines,
    Sampler,
    SyncProduceStrategy,
    TrainState,
    produce_loop,
    publish,
)
from tests.reasons import because

DATA = Path(__file__).resolve().parents[1] / "data"
FILES = sorted(path.name for path in DATA.glob("math.*.jsonl"))
PROMPTS, BATCH, REPEAT = 40, 8, 2


class Solver:
    """Stands in for an engine: it knows the answers, and one rollout of a group is wrong."""

    async def generate_group(self, group: list[RolloutState], *, partial: bool) -> None:
        for place, rollout in enumerate(group):
            assert rollout.reward_model is not None
            truth = str(rollout.reward_model["ground_truth"])
            rollout.response = f"Step by step ... #### {truth if place else int(float(truth)) + 1}"
            rollout.response_ids = list(rollout.response.encode())
            rollout.reward = float(rollout.response.rpartition("#### ")[2] == truth)
            rollout.status = Status.COMPLETED
            await asyncio.sleep(0)

    async def pause(self) -> None:
        pass

    async def resume(self) -> None:
        pass


def dataset(name: str, folder: Path) -> Any:
    """The prompts of a JSONL file, or of a Parquet file with the same records."""
    if name.endswith(".jsonl"):
        return JSONLines(DATA / name)
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(list(JSONLines(DATA / name.replace("parquet", "jsonl"))))
    parquet.write_table(table, folder / name)
    return parquet.read_table(folder / name).to_pylist()


def sampler(buffer: ReplayBuffer, prompts: Any) -> Sampler:
    return Sampler(buffer, prompts, "math", prompt_repeat_k=REPEAT, epochs=1, shuffle=1)


async def ahead(
    strategy: Any, config: ReplayBufferConfig, buffer: ReplayBuffer, prompts: Any
) -> AsyncIterator[list[list[RolloutState]]]:
    """Batches that are produced by the process that trains."""
    source = sampler(buffer, prompts)
    for step in range(1, PROMPTS // BATCH + 1):
        await strategy.produce_batch(Solver(), source, BATCH, train_step=step, model_step=step - 1)
        yield await buffer.get(BATCH, "math")
    with pytest.raises(ProduceError, check=because("exhausted")):
        await strategy.produce_batch(Solver(), source, BATCH, train_step=step + 1, model_step=step)


async def apart(
    strategy: Any, config: ReplayBufferConfig, buffer: ReplayBuffer, prompts: Any
) -> AsyncIterator[list[list[RolloutState]]]:
    """Batches that a worker produces, which has opened the database for itself."""
    async with config.build() as workers:
        work = asyncio.create_task(produce_loop(strategy, Solver(), sampler(workers, prompts), BATCH))
        for step in range(1, PROMPTS // BATCH + 1):
            await publish(buffer, TrainState(train_step=step, model_step=step - 1))
            yield await buffer.get(BATCH, "math", timeout=60)
        await publish(buffer, TrainState(step, step, finished=True))
        assert (await work).produced == PROMPTS


MODES = {
    "sync": (ahead, SyncProduceStrategy()),
    "async": (ahead, AsyncProduceStrategy(over_sample=0.5, max_staleness=4)),
    "disaggregated": (apart, AsyncProduceStrategy(over_sample=1.0, max_staleness=4)),
}


@pytest.mark.parametrize(
    ("mode", "name"),
    [*(("sync", name) for name in (*FILES, "math.verl.parquet")), ("async", FILES[0]), ("disaggregated", FILES[0])],
)
async def test_every_problem_is_trained_once_with_its_answer(mode: str, name: str, tmp_path: Path) -> None:
    produce, strategy = MODES[mode]
    prompts = dataset(name, tmp_path)
    trained: list[list[RolloutState]] = []
    config = ReplayBufferConfig(url=f"sqlite:///{tmp_path}/run.db", capacity=2 * BATCH, on_full="block")
    async with config.build() as buffer:
        async for batch in produce(strategy, config, buffer, prompts):
            assert len(batch) == BATCH
            trained += batch
        assert len(buffer) == 0
    assert all([rollout.reward for rollout in group] == [0.0, 1.0] for group in trained)
    asked = [group[0].message[-1]["content"] for group in trained]
    records = [json.loads(line) for line in (DATA / name.replace("parquet", "jsonl")).read_text("utf-8").splitlines()]
    questions = [(record.get("prompt") or record.get("messages"))[0]["content"] for record in records]
    assert sorted(asked) == sorted(questions)
    assert len(set(asked)) == PROMPTS
    kept = {group[0].message[-1]["content"]: group[0] for group in trained}
    if "verl" in name:
        for record, question in zip(records, questions, strict=True):
            rollout = kept[question]
            assert (rollout.data_source, rollout.reward_model) == (record["data_source"], record["reward_model"])
            assert rollout.extra_fields == {"ability": record["ability"], "extra_info": record["extra_info"]}
