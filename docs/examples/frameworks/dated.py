"""slime's Sample with the model step of each token: `rollout_type=DatedSample, fields=fields`."""

import dataclasses

from slime.utils.types import Sample


@dataclasses.dataclass
class DatedSample(Sample):
    response_ids: list[int] = dataclasses.field(default_factory=list)
    response_model_steps: list[int] = dataclasses.field(default_factory=list)


fields = {"response_mask": "loss_mask", "logprobs": "rollout_log_probs"}  # rollout_type=DatedSample, fields=fields
