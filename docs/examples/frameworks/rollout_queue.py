"""The queue between OpenRLHF's generator and trainer, over a buffer."""

from functools import cached_property

from openrlhf.trainer.ppo_utils.experience import Experience

from replaybuf import ReplayBufferConfig


class RolloutQueue:
    def __init__(self, url, maxsize):
        bounded = {"policy": "fifo", "capacity": maxsize, "on_full": "block", "put_timeout": None}
        self.config = ReplayBufferConfig(url=url, rollout_type=dict, types=[Experience], **bounded)
        self.lease = None

    buffer = cached_property(lambda self: self.config.build_sync())  # each actor opens its own

    def put(self, payload, block=True, timeout=None):
        group = [{"message": payload}]  # ("eval", ...) or "done"
        if isinstance(payload[0], list):
            samples, *others = payload
            group = [{"experience": sample, "reward": float(sample.rewards.mean())} for sample in samples]
            group[0]["others"] = others
        self.buffer.put(group, "train", status="completed")

    def get(self, block=True, timeout=None):
        if self.lease:
            self.lease.acknowledge()  # the trainer asks for more: it has trained on it, and saved
        self.lease = self.buffer.lease_batch({"train": 1}, timeout=timeout).begin()
        [group] = self.lease.batch["train"]
        if "message" in group[0]:
            return group[0]["message"]
        return [row["experience"] for row in group], *group[0]["others"]
