"""A small but real run of GRPO on a replay buffer: `replaybuf demo`.

`policy` has the prompts, the verifier, the model, its training and its engine; `worker` what a run keeps, and the
process of a rollout worker; `trainer` the training loop and its display.
"""
