"""verl's own loop of fully asynchronous training over the queue: its driver, trainer and rollouter, without GPUs.

Of the trainer's step and the rollouter only what needs GPU workers is replaced: generation and the update of weights.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from verl.experimental.fully_async_policy.fully_async_main import FullyAsyncTaskRunner
from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncRollouter
from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer

from replaybuf import ReplayBufferConfig
from replaybuf.integrations.verl import BufferQueueClient
from tests.integrations.test_verl import batch_of

REQUIRED = 2
CONFIG = OmegaConf.create(
    {
        "global_profiler": {"steps": None},
        "trainer": {"balance_batch": False, "test_freq": 1},
        "actor_rollout_ref": {"rollout": {"temperature": 1.0, "n": 4, "multi_turn": {"enable": True}}},
    }
)


class Trainer(FullyAsyncTrainer.__ray_metadata__.modified_class):  # type: ignore[misc]
    """Writes the samples of each step to `trained`; in its second step it writes `stopped`, and stops, if told to."""

    def __init__(self, folder: str, stops: bool) -> None:
        self.folder, self.stops = Path(folder), stops
        self.config, self.tokenizer, self.rollouter = CONFIG, None, "set"
        self.required_samples, self.dynamic_schedule_enabled = REQUIRED, False
        self.dynamic_resource_controller = None
        self.global_steps = self.epoch = self.current_param_version = self.stale_trajectory_processed = 0
        self.local_trigger_step = self.trigger_parameter_sync_step = 1
        self._step_wait_times: list[float] = []
        self._step_wait_samples: list[int] = []
        self.progress_bar = io.StringIO()  # it is closed at the end

    def _fit_update_actor(self, batch: Any) -> Any:
        if self.stops and self.current_param_version == 1:
            (self.folder / "stopped").write_text(str(os.getpid()))
            threading.Event().wait()
        with (self.folder / "trained").open("a") as log:
            print(*dict.fromkeys(batch.non_tensor_batch["uid"]), file=log)
        return batch

    def _pass_on(self, batch: Any = None, **options: Any) -> Any:
        return batch

    async def _skip(self) -> None:
        pass

    _fit_update_weights = _fit_validate = _skip
    _fit_compute_reward = _fit_compute_log_prob = _fit_compute_ref_log_prob = _fit_compute_critic = _pass_on
    _fit_compute_advantage = _fit_update_critic = _fit_dump_data = _fit_collect_metrics = _pass_on
    _fit_start_profile = _fit_stop_profile = _fit_save_checkpoint = _fit_postprocess_step = _pass_on


class Rollouter(FullyAsyncRollouter.__ray_metadata__.modified_class):  # type: ignore[misc]
    """Makes the samples `first` to `last`."""

    def __init__(self, first: int, last: int) -> None:
        self.config, self.global_steps, self.total_rollout_steps = CONFIG, first, last
        self.max_required_samples = self.max_queue_size = 100
        self.max_concurrent_samples = 1
        self.total_generated_samples = self.staleness_samples = self.dropped_stale_samples = 0
        self.processed_sample_count = self._step_generated_samples = 0
        self.paused, self.running = False, True
        self.pending_queue: Any = asyncio.Queue()
        self.active_tasks: Any = set()
        self._active_count_history: list[Any] = []
        self.async_rollout_manager = self
        self._init_async_objects()

    def _create_continuous_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number in range(self.global_steps, self.total_rollout_steps + 1):
            yield 0, {"number": torch.tensor([[number]])}

    async def generate_sequences_single(self, prompts: Any) -> Any:
        batch = batch_of(1, 4, seed=int(prompts.batch["number"][0]))
        batch.non_tensor_batch["max_global_steps"] = batch.non_tensor_batch["min_global_steps"]
        return batch

    async def get_statistics(self) -> dict[str, Any]:
        return {}

    async def _async_monitor_loop(self) -> None:
        pass


def run(url: str, folder: str, first: int, last: int, *, stops: bool) -> None:
    """Run the driver's training loop: a run of its own, with samples of these numbers."""
    ray.init(num_cpus=1, include_dashboard=False)
    runner = FullyAsyncTaskRunner.__ray_metadata__.modified_class()
    trainer = ray.remote(num_cpus=0)(Trainer).remote(folder, stops)
    rollouter = ray.remote(num_cpus=0)(Rollouter).remote(first, last)
    client = BufferQueueClient(ReplayBufferConfig(url=url, policy="fifo"), REQUIRED, seconds=5)
    ray.get([actor.set_message_queue_client.remote(client) for actor in (trainer, rollouter)])
    runner.components = {"trainer": trainer, "rollouter": rollouter, "message_queue_client": client}
    runner._run_training_loop()
