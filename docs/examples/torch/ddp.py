"""One rank takes for all, and each gets a part of nearly equal numbers of tokens.

`torchrun --nproc-per-node=2 ddp.py`, with `fill.py` and `train.py` of docs/torch.md.
"""

import contextlib

import torch
import torch.distributed as dist
from fill import config
from torch.utils.data import DataLoader
from train import loss, model

from replaybuf.integrations.torch import GroupDataset, Pad, balance, leased_steps, sequences, split_steps

pad = Pad(pad_token_id=0)


def parts(items: list) -> list:
    made = sequences(items)
    shares = balance([len(one) for one in made], dist.get_world_size(), same_size=True)
    return [pad.pad([made[index] for index in share]) for share in shares]


dist.init_process_group("gloo")  # with GPUs "cpu:gloo,cuda:nccl"
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with contextlib.ExitStack() as stack:
    own = None
    if dist.get_rank() == 0:
        dataset = GroupDataset(config, {"math": 4}, collate=parts, timeout=600)
        loader = DataLoader(dataset, batch_size=None, num_workers=1)
        own = stack.enter_context(leased_steps(loader))
    for number, step in enumerate(split_steps(own, source=0), 1):
        optimizer.zero_grad()
        loss(step.batch).backward()
        for parameter in model.parameters():  # or DistributedDataParallel(model)
            dist.all_reduce(parameter.grad)
        optimizer.step()
        step.acknowledge()
        if number == 2:
            break
if dist.get_rank() == 1:
    print(number, "steps, each with", len(step.batch["input_ids"]), "of 12 sequences")
dist.destroy_process_group()

# Prints:
# 2 steps, each with 6 of 12 sequences
