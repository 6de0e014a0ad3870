"""Classes of rollouts as frameworks have them, by the fields that they publish."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

if TYPE_CHECKING:
    import torch  # type: ignore[import-not-found]
    from ray import ObjectRef  # type: ignore[import-not-found]
else:
    ObjectRef: TypeAlias = Any

# InternLM xtuner: xtuner/v1/data_proto/rl_data.py


class XtunerStatus(Enum):
    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


class SampleParams(BaseModel):
    model_config = ConfigDict(extra="forbid")
    n: int = 1
    top_k: int = 0
    top_p: float = 1.0
    temperature: float = 1.0
    max_tokens: int = 2048
    stops: list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    sampling_seed: int | None = None
    return_logprob: bool = True


class MultimodalInfo(TypedDict):
    pixel_values: NotRequired[np.ndarray[Any, Any] | ObjectRef | None]
    image_grid_thw: NotRequired[np.ndarray[Any, Any] | None]
    num_img_tokens: NotRequired[list[int]]


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    arguments: Any = Field(default_factory=dict)
    raw_arguments_text: str | None = None


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class XtunerRollout(BaseModel):
    """xtuner's RolloutState."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    group_id: int | None = None
    message: list[dict[str, Any]]
    prompt_ids: list[int] | None = None
    num_tokens: int | None = None
    proxy_attn_flops: float | None = None
    data_source: dict[str, Any] | str | None = None
    mm_info: MultimodalInfo | None = None
    reward_model: dict[str, Any] | None = None
    session_id: int | None = None
    tokens: list[int] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    sample_params: SampleParams = SampleParams()
    response: str | None = None
    tool_calls: list[ToolCall] | None = None
    response_ids: list[int] | None = None
    logprobs: list[float] | None = None
    routed_experts: np.ndarray[Any, Any] | ObjectRef | list[ObjectRef] | None = None
    finish_reason: str | None = None
    response_mask: list[int] | None = None
    response_model_steps: list[int] | None = None
    seq_staleness: int = 0
    input_ids: list[int] | None = None
    labels: list[int] | None = None
    reward: dict[str, Any] | None = None
    rollout_id: int | None = None
    uid: int | None = None
    task_name: str | None = None
    status: XtunerStatus = XtunerStatus.INIT
    error_msg: str | None = None
    position_ids: np.ndarray[Any, Any] | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)

    def model_post_init(self, context: Any) -> None:
        if self.rollout_id is None:
            self.rollout_id = self.uid
        else:
            self.uid = self.rollout_id


# THUDM slime: slime/utils/types.py


@dataclasses.dataclass
class Sample:
    """slime's Sample."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: list[list[int]] | torch.Tensor | None = None
    remove_sample: bool = False

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    @dataclasses.dataclass
    class SpecInfo:
        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0

    spec_info: SpecInfo = field(default_factory=SpecInfo)

    @dataclasses.dataclass
    class PrefixCacheInfo:
        cached_tokens: int = 0
        total_prompt_tokens: int = 0

    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)


# allenai open-instruct: open_instruct/data_types.py


@dataclasses.dataclass
class TokenStatistics:
    num_prompt_tokens: int
    num_response_tokens: int
    generation_time: float
    earliest_start_time: float | None = None


@dataclasses.dataclass
class ToolCallStats:
    tool_name: str
    success: bool
    runtime: float


@dataclasses.dataclass
class RequestInfo:
    num_calls: list[int]
    timeouts: list[int]
    tool_errors: list[str]
    tool_call_stats: list[list[ToolCallStats]] = field(default_factory=list)
    rollout_states: list[dict[str, Any]] = field(default_factory=list)


@dataclasses.dataclass
class GenerationResult:
    """open-instruct's GenerationResult: all responses of a prompt, and no status."""

    responses: list[list[int]]
    finish_reasons: list[str]
    masks: list[list[int]]
    request_info: RequestInfo
    index: int | None
    prompt_id: str | None
    token_statistics: TokenStatistics | None = None
    start_time: float = 0.0
    logprobs: list[list[float]] = field(default_factory=list)
    reward_scores: list[float] | None = None
    reward_metrics: dict[str, Any] | None = None
    model_step: int = 0


def xtuner_group() -> list[Any]:
    """A group of xtuner's rollouts, one of them with what its tools and images leave."""
    call = ToolCall(id="call_1", function=FunctionCall(name="add", arguments={"a": 1}))
    with_tools = XtunerRollout(
        rollout_id=1,
        message=[{"role": "user", "content": "1 + 2"}],
        sample_params=SampleParams(n=4, stops=["</s>"]),
        tool_calls=[call],
        mm_info={"num_img_tokens": [4]},
        response_ids=[5, 6],
        reward={"score": 1.0},
        status=XtunerStatus.COMPLETED,
    )
    return [with_tools, XtunerRollout(uid=2, message=[], status=XtunerStatus.COMPLETED)]


def slime_group() -> list[Any]:
    """A group of slime's samples; a truncated one is as good as a completed one."""
    statuses = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    return [
        Sample(
            index=index,
            prompt="1 + 2",
            tokens=[1, 2, 3],
            response="3",
            response_length=1,
            reward=0.5,
            loss_mask=[1],
            metadata={"pair": (1, 2)},
            status=status,
            spec_info=Sample.SpecInfo(3, 4),
        )
        for index, status in enumerate(statuses)
    ]


def open_instruct_group() -> list[Any]:
    """One result of open-instruct."""
    info = RequestInfo([1], [0], [""], [[ToolCallStats("python", True, 0.5)]], [{"done": True}])
    statistics = TokenStatistics(2, 1, 0.25)
    return [GenerationResult([[5]], ["stop"], [[1]], info, 3, "p3", statistics, logprobs=[[-0.5]], model_step=7)]
