"""A small but real run of GRPO on a replay buffer: `replaybuf demo`.

`policy` has the prompts, the verifier, the model and its training. `trainer` has the training loop and the production
of groups in each mode, `worker` the process of a rollout worker and the generation. `run_folder` stores the weights,
`display` is the output on the terminal.
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
