"""A small but real run of asynchronous GRPO on a replay buffer: `replaybuf demo`.

`arithmetic` has the prompts and the verifier, `policy` the token-level model, `generation` the work of a rollout
worker, `grpo` (with `adam`) that of the trainer, and `weights` the way of new weights from the trainer to the workers.

The matrices are small: processes that compute should start with OPENBLAS_NUM_THREADS=1 in their environment (it is read
when numpy is imported). With the default of one thread per core, a training step takes several times as long.
"""
