"""A small but real run of asynchronous GRPO on a replay buffer: `replaybuf demo`.

`arithmetic` has the prompts and the verifier, `policy` the token-level model, `generation` what a rollout worker does
with them, `grpo` (with `adam`) what the trainer does, `weights` how new weights get from the trainer to the workers.

The matrices are small: processes that compute should start with OPENBLAS_NUM_THREADS=1 in their environment (it counts
when numpy is imported). With the default of a thread a core, a training step takes several times as long.
"""
