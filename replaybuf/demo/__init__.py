"""A small but real run of GRPO on a replay buffer: `replaybuf demo`.

`policy` has the prompts, the verifier, the model and its training; `worker` the engine, and the process of a rollout
worker; `trainer` the training loop and its display; `run_folder` the settings and the saved weights.
"""

from enum import StrEnum


class Mode(StrEnum):
    """Where and when groups are generated.

    SYNC: by the trainer, exactly those of the next step; ASYNC: by the trainer, more than those; DISAGGREGATED: by
    other processes, continuously.
    """

    SYNC = "sync"
    ASYNC = "async"
    DISAGGREGATED = "disaggregated"
