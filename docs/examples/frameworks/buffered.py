"""A data source for slime: `--data-source-path buffered.BufferedDataSource`.

For generators in processes of their own: `--rollout-function-path buffered.generate_rollout`.
"""

import os

from slime.rollout.data_source import RolloutDataSource
from slime.utils.types import Sample

from replaybuf import ReplayBufferConfig


class BufferedDataSource(RolloutDataSource):
    def __init__(self, args):
        super().__init__(args)
        config = ReplayBufferConfig(url=os.environ["REPLAYBUF_URL"], policy="fifo", rollout_type=Sample)
        self.buffer = config.build_sync()

    def get_samples(self, num_samples):
        begun = self.buffer.get(num_samples, "math", Sample.Status.ABORTED)
        return begun + super().get_samples(num_samples - len(begun))

    def add_samples(self, samples):
        for group in samples:
            self.buffer.put(group, "math")

    def save(self, rollout_id):
        super().save(rollout_id)
        self.buffer.checkpoint(rollout_id)

    def load(self, rollout_id=None):
        super().load(rollout_id)
        if rollout_id in [made.step for made in self.buffer.checkpoints()]:
            self.buffer.restore(rollout_id)


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    return data_source.buffer.get(args.rollout_batch_size, "math", timeout=3600, current_train_step=rollout_id)
