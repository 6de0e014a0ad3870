"""A batch of verl as groups of rollouts, and back."""

import asyncio

import numpy as np
import torch
from verl import DataProto

from replaybuf import ReplayBufferConfig
from replaybuf.integrations.verl import from_groups, to_groups


def generate() -> DataProto:
    """Stands in for `generate_sequences`: two prompts, two responses each, padded as verl pads them."""
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    ids = torch.arange(24).reshape(4, 6) * mask
    tensors = {"prompts": ids[:, :3], "responses": ids[:, 3:], "input_ids": ids, "attention_mask": mask}
    tensors |= {"response_mask": mask[:, 3:], "rm_scores": torch.tensor([[0, 1.0, 0], [0] * 3, [0, 0, 1.0], [0] * 3])}
    return DataProto.from_dict(tensors, {"uid": np.array(["a", "a", "b", "b"], dtype=object)})


async def main() -> None:
    async with ReplayBufferConfig(url="sqlite:///run.db", policy="fifo").build() as buffer:
        batch = generate()
        for group in to_groups(batch):
            await buffer.put(group, "math", current_train_step=1)
        async with buffer.lease_batch({"math": 2}, timeout=600) as lease:
            again = from_groups(lease.batch["math"])
            # update_actor(again), and save the weights
        for rollouts in lease.batch["math"]:
            print(rollouts[0].group_id, [(len(one.prompt_ids), len(one.response_ids), one.reward) for one in rollouts])
        print(all(again.batch[name].equal(tensor) for name, tensor in batch.batch.items()))


asyncio.run(main())

# Prints:
# a [(2, 2, 1.0), (2, 1, 0.0)]
# b [(3, 3, 1.0), (3, 2, 0.0)]
# True
