"""A rollout worker and its queue for AsyncGRPOTrainer, over the buffer that `generate.py` fills."""

import queue

import numpy as np
from rollouts import FromBuffer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from replaybuf import NotReadyError


class BufferedWorker(FromBuffer):
    def __init__(self, buffer, groups):  # groups of a train step
        super().__init__(buffer)
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.sizes, self.samples, self.version = {"math": groups}, [], 0

    start = stop = check_health = lambda self, *arguments: None  # generators run on their own

    def qsize(self):
        return len(self.samples)

    def update_model_version(self, version):
        self.version = version

    def get(self, timeout=None):
        if not self.samples:
            try:
                self.leases.append(self.buffer.lease_batch(self.sizes, timeout=timeout).begin())
            except NotReadyError:
                raise queue.Empty from None
            self.samples = [sample for group in self.leases[-1].batch["math"] for sample in self.scored(group)]
        return self.samples.pop(0)

    def scored(self, group):
        rewards = np.array([rollout.reward for rollout in group])
        for rollout, advantage in zip(group, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True):
            ids, prompt = np.array([*rollout.prompt_ids, *rollout.response_ids]), len(rollout.prompt_ids)
            logprobs = np.array([*[0.0] * prompt, *rollout.logprobs], dtype=np.float32)
            turns = rollout.message, [{"role": "assistant", "content": rollout.response}]
            place = self.version, rollout.group_id, {"reward": rollout.reward}
            yield RolloutSample(*turns, ids, np.arange(len(ids)) >= prompt, logprobs, float(advantage), *place)
