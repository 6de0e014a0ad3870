"""A small but real run of GRPO on a replay buffer: `replaybuf demo`.

`policy` has the prompts, the verifier, the model, its training and its engine; `worker` the files of a run, and
the process of a rollout worker; `trainer` the training loop.
"""
