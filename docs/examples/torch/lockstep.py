"""Each rank takes for itself; steps begin and end together.

`torchrun --nproc-per-node=2 lockstep.py`, with `fill.py` and `train.py` of docs/torch.md.
"""

import torch.distributed as dist
from fill import config
from torch.utils.data import DataLoader

from replaybuf.integrations.torch import GroupDataset, Pad, leased_steps, lockstep

dist.init_process_group("gloo")
dataset = GroupDataset(config, {"math": 2}, collate=Pad(pad_token_id=0), timeout=600)
with leased_steps(DataLoader(dataset, batch_size=None)) as own:
    steps = lockstep(own, timeout=1800)
    for _ in range(2):
        with next(steps) as step:
            pass  # train
if dist.get_rank() == 0:
    print("2 steps of", dist.get_world_size(), "ranks")
dist.destroy_process_group()

# Prints:
# 2 steps of 2 ranks
