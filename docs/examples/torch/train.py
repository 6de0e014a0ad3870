"""A training loop that may be killed at any moment, over the groups of `fill.py`."""

import os

import torch
from fill import config
from torch.utils.data import DataLoader

from replaybuf.integrations.torch import GroupDataset, Pad, leased_steps

WEIGHTS, STEPS = "weights.pt", 6

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"])[:, :-1]  # of the next tokens
    logprobs = torch.log_softmax(logits, -1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    mask = batch["loss_mask"][:, 1:]
    ratio = torch.exp(logprobs - batch["logprobs"][:, 1:])
    return -(ratio * batch["advantages"][:, 1:] * mask).sum() / mask.sum()


def save(step: int) -> None:
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, f"{WEIGHTS}.new")
    os.replace(f"{WEIGHTS}.new", WEIGHTS)  # at any moment there is the old file or the new one, and both are whole


def load() -> int:
    state = torch.load(WEIGHTS, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


if __name__ == "__main__":
    with config.build_sync() as buffer:
        if os.path.exists(WEIGHTS):
            done = load()
            print("goes on after step", done, flush=True)
        else:
            done = 0
            buffer.checkpoint(0)
            save(0)
        buffer.restore(done)  # the buffer as it was with these weights
        dataset = GroupDataset(config, {"math": 4}, collate=Pad(pad_token_id=0), timeout=600)
        loader = DataLoader(dataset, batch_size=None, num_workers=1)
        with leased_steps(loader, train_step=done + 1) as steps:
            for number, step in zip(range(done + 1, STEPS + 1), steps, strict=False):
                optimizer.zero_grad()
                loss(step.batch).backward()
                optimizer.step()
                step.acknowledge()  # the groups leave the buffer
                buffer.checkpoint(number)  # first the buffer,
                save(number)  # then the weights: killed in between, both go back to the step before
                uids = [item.uid for item in step.items["math"]]
                print(number, tuple(step.batch["input_ids"].shape), uids, flush=True)

# Prints:
# 1 (12, 20) [1, 2, 3, 4]
# 2 (12, 20) [5, 6, 7, 8]
# 3 (12, 21) [9, 10, 11, 12]
# 4 (12, 21) [13, 14, 15, 16]
# 5 (12, 21) [17, 18, 19, 20]
# 6 (12, 21) [21, 22, 23, 24]
