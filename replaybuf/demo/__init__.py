"""A small but real run of GRPO on a replay buffer: `replaybuf demo`.

`policy` has the prompts, the verifier, the model and its training. `trainer` is the run, and where
its groups come from in each mode, `worker` the process of a rollout worker and the generation. `run_folder` keeps the
weights, `display` is what people see.
"""

from enum import StrEnum


class Mode(StrEnum):
    """Where and when groups are generated.

    By the trainer, just those of the next step; by the trainer, more than those; or by other processes, all the time.
    """

    SYNC = "sync"
    ASYNC = "async"
    DISAGGREGATED = "disaggregated"
