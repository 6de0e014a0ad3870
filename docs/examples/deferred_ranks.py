"""Ranks that load their own tensors: the one that leases balances groups by SQL, and moves no tensor.

`torchrun --nproc-per-node=2 docs/examples/deferred_ranks.py`. Mixture-of-experts training replays the experts that each
token went through, 10 to 30 MB a rollout. They stay in the folder deferred-payloads until the rank that trains on a
rollout reads its own; rank 0 leases, shares groups out by their tokens, and sends handles.
"""

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader

from replaybuf import ReplayBufferConfig, RolloutState, Status, StorageItem, load_into
from replaybuf.integrations.torch import GroupDataset, balance, leased_steps, split_steps

FILE, PAYLOADS = Path("deferred.db"), Path("deferred-payloads")
CONFIG = ReplayBufferConfig(url=f"sqlite:///{FILE}", payloads=str(PAYLOADS), policy="fifo")
LAYERS, TOP_K, GROUPS = 48, 8, 4


def rollout(tokens: int) -> RolloutState:
    """Stands in for your rollout workers."""
    experts = np.random.default_rng(tokens).integers(0, 128, (tokens, LAYERS, TOP_K), np.int16)
    fields: dict[str, Any] = {"response_ids": [1] * tokens, "routed_experts": experts, "reward": tokens / 1000}
    return RolloutState(message=[], prompt_ids=[1, 2], status=Status.COMPLETED, **fields)


def fill() -> None:
    PAYLOADS.mkdir(exist_ok=True)
    with CONFIG.build_sync() as buffer:
        for number in range(2 * GROUPS):
            buffer.put([rollout(100 + 150 * number), rollout(80)], "math")


def parts(items: list[StorageItem[Any]]) -> list[list[StorageItem[Any]]]:
    """Share groups out to the ranks by their tokens, which the database knows: nothing is decoded for it."""
    uids = json.dumps([item.uid for item in items])
    tokens = "SELECT uid, prompt_tokens + response_tokens FROM groups WHERE uid IN (SELECT value FROM json_each(?))"
    with contextlib.closing(sqlite3.connect(FILE)) as database:
        lengths = dict(database.execute(tokens, [uids]))
    shares = balance([lengths[item.uid] for item in items], dist.get_world_size(), same_size=True)
    return [[items[place] for place in share] for share in shares]


def main() -> None:
    dist.init_process_group("gloo")  # with GPUs "cpu:gloo,cuda:nccl"
    rank = dist.get_rank()
    with contextlib.ExitStack() as stack:
        own = None
        if rank == 0:
            fill()
            dataset = GroupDataset(CONFIG, {"math": GROUPS}, collate=parts, deferred=["routed_experts"], timeout=0)
            own = stack.enter_context(leased_steps(DataLoader(dataset, batch_size=None)))
        for number, step in enumerate(split_steps(own, source=0), 1):
            experts = [one.routed_experts for item in load_into(step.batch) for one in item.item]  # this rank's only
            size, tokens = sum(one.nbytes for one in experts), sum(len(one) for one in experts)
            print(f"step {number}, rank {rank}: {len(step.batch)} groups, {tokens} tokens, {size >> 10} KB", flush=True)
            step.acknowledge()  # after the optimizer's step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
