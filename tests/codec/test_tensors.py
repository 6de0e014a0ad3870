"""torch tensors. What needs torch is skipped without it; the format and its damage are tested by hand."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaybuf.errors import DecodeError, RolloutError
from replaybuf.values.codec import value_types as ext
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.group_fields import fields_of
from replaybuf.values.rollouts.marks import Marks
from replaybuf.values.rollouts.outline import outline
from replaybuf.values.rollouts.rollout_type import RolloutType
from replaybuf.values.rollouts.staleness import date_responses, mask_stale_tokens, reset_response
from tests.codec.values import DICTS, MARK, hostile_field, round_trip
from tests.scripts import run

KIND = RolloutType(dict)
ARRAYS = Codec(KIND, tensors="numpy")
DTYPES = (
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def as_array(value: Any) -> Any:
    return ARRAYS.decode(DICTS.encode([{"field": value}]))[0]["field"]


def by_hand(name: Any, shape: Any, raw: Any) -> bytes:
    """A payload with a tensor of these bytes."""
    if type(raw) is not bytes:
        return hostile_field({MARK[ext.TENSOR]: [name, shape, raw]})
    array = msgpack.ExtType(ext.ARRAY, bytes(8))
    return hostile_field({MARK[ext.TENSOR]: [name, shape, array]}, table=["|u1", raw, [len(raw)]])


def same_tensor(a: Any, b: Any) -> bool:
    """Equal in class, dtype, shape and bits."""
    torch = sys.modules["torch"]
    flat = [tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)) for tensor in (a, b)]
    bits = [elements.view(torch.uint8).tolist() if elements.numel() else [] for elements in flat]
    descriptions = [(type(tensor), tensor.dtype, tensor.shape, tensor.device.type) for tensor in (a, b)]
    return bool(bits[0] == bits[1] and descriptions[0] == descriptions[1])


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(torch: ModuleType, name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(256, dtype=torch.uint8)
    raw = raw % 2 if name == "bool" else raw
    tensor = raw.view(dtype).reshape(2, -1)
    assert same_tensor(round_trip(tensor), tensor)
    array = as_array(tensor)
    expected = tensor.float() if name == "bfloat16" else tensor
    assert array.shape == (2, tensor.shape[1])
    assert np.array_equal(array, expected.numpy(), equal_nan=tensor.is_floating_point() or tensor.is_complex())
    assert array.flags.writeable


@given(st.data())
def test_tensors_of_any_shape_and_layout_come_back(data: st.DataObject) -> None:
    torch: Any = pytest.importorskip("torch")
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = getattr(torch, data.draw(st.sampled_from(["float32", "int64", "bfloat16", "complex64", "bool"])))
    tensor = torch.arange(int(np.prod(shape)) * 2).to(dtype).reshape(*shape, 2)[..., data.draw(st.integers(0, 1))]
    tensor = data.draw(
        st.sampled_from([lambda t: t, lambda t: t.expand(2, *t.shape), lambda t: t.mT if t.ndim > 1 else t])
    )(tensor)
    assert same_tensor(round_trip([{"a": (tensor,)}])[0]["a"][0], tensor)


def test_tensors_come_back_without_autograd(torch: ModuleType) -> None:
    restored = round_trip(torch.ones(2, requires_grad=True) * 2)
    assert same_tensor(restored, torch.full((2,), 2.0))
    assert not restored.requires_grad


def test_a_restored_tensor_has_memory_of_its_own(torch: ModuleType) -> None:
    payload = DICTS.encode([{"field": [torch.zeros(1, dtype=torch.uint8), torch.zeros(3)]}])
    for restored in DICTS.decode(payload)[0]["field"]:
        restored += 1
    assert [restored.max() for restored in DICTS.decode(payload)[0]["field"]] == [0, 0]


def test_what_can_not_be_stored_says_what_to_do(torch: ModuleType) -> None:
    class Mine(torch.Tensor):
        pass

    refused = [
        (torch.eye(2).to_sparse(), r"sparse .* can't be stored: convert it with .*\.to_dense\(\)"),
        (torch.empty(2, device="meta"), "can't be stored"),
        (torch.nn.Parameter(torch.ones(2)), r"Parameter can't be stored: convert it with \.as_subclass"),
        (torch.zeros(2, dtype=torch.float8_e5m2), r"or \.view\(torch.uint8\) to keep its bytes"),
        (torch.ones(2).as_subclass(Mine), r"Mine can't be stored: convert it with \.as_subclass\(torch.Tensor\)"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), r"or \.view\(torch.uint8\) to keep its bytes"),
    ]
    for tensor, message in refused:
        with pytest.raises(RolloutError, match=r"rollouts\[0\]\['field'\]\['a'\]\[1\]: a tensor .*" + message):
            DICTS.encode([{"field": {"a": [torch.ones(1), tensor]}}])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensors_are_refused(torch: ModuleType) -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(RolloutError, match=r"quantised, .* convert it with \.dequantize\(\)"):
        DICTS.encode([{"field": tensor}])


def test_reading_imports_torch_only_for_a_tensor_that_is_to_be_one() -> None:
    code = """
import sys
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.rollout_type import RolloutType
payload = bytes.fromhex(sys.argv[1])
codec = Codec(RolloutType(dict), tensors="numpy")
codec.encode([{"a": 1}])
print(codec.decode(payload)[0]["field"].tolist(), "torch" in sys.modules)
sys.modules["torch"] = None
try:
    Codec(RolloutType(dict)).decode(payload)
except Exception as error:
    print(type(error).__name__, error)
"""
    payload = by_hand("bfloat16", [1, 2], bytes.fromhex("803f0040"))
    first, second = run(code, payload.hex()).splitlines()
    assert first == "[[1.0, 2.0]] False"
    assert second.startswith("DecodeError it holds a torch tensor, and torch isn't installed here")


@pytest.mark.parametrize(
    "content",
    [
        ("float32", [2**40], bytes(4)),
        ("float32", [-1, -1], bytes(4)),
        ("float32", [1] * 100, bytes(4)),
        ("float32", [True], bytes(4)),
        ("float32", [1], [0, 0, 0, 0]),
        ("float32", 1, bytes(4)),
        ("qint8", [1], bytes(1)),
        ("load", [1], bytes(1)),
        ([], [1], bytes(1)),
    ],
)
def test_hostile_tensors_are_refused(content: tuple[Any, ...]) -> None:
    for codec in (DICTS, ARRAYS):
        with pytest.raises(DecodeError, match=r"the payload is damaged: .+"):
            codec.decode(by_hand(*content))


def test_impossible_tensors_are_refused(torch: ModuleType) -> None:
    with pytest.raises(DecodeError):
        DICTS.decode(by_hand("float32", [2**62, 2**62, 0], b""))


# Rollouts of tensors


def rollout(torch: Any, **fields: Any) -> dict[str, Any]:
    return {"status": "completed", "response_ids": torch.tensor([5, 6, 7]), "prompt_ids": torch.tensor([1, 2])} | fields


def test_rewards_that_are_tensors_count_as_numbers(torch: ModuleType) -> None:
    rewards = [torch.tensor(1.0), torch.tensor([0.5], dtype=torch.bfloat16), {"score": torch.tensor([[2]])}]
    rewards += [torch.tensor(1e-40, dtype=torch.float64, requires_grad=True), torch.tensor([1.0, 2.0])]
    rewards += [torch.tensor(torch.nan), np.array([3.0]), torch.ones(1, dtype=torch.complex64)]
    marks_ = Marks.of([rollout(torch, reward=reward) for reward in rewards], KIND)
    assert marks_.reward == [1.0, 0.5, 2.0, 1e-40, None, None, 3.0, None]


def test_tokens_that_are_tensors_are_filled_and_counted(torch: ModuleType) -> None:
    short = torch.tensor([4, 4], dtype=torch.int16)
    rollouts = [rollout(torch), rollout(torch, response_model_steps=short)]
    rollouts[1]["response_mask"] = torch.tensor([True, False, False])
    date_responses(rollouts, fields_of(rollouts, KIND), 9, KIND)
    assert [member["response_model_steps"].tolist() for member in rollouts] == [[9, 9, 9], [4, 4, 9]]
    assert [member["response_model_steps"].dtype for member in rollouts] == [torch.int32, torch.int16]
    marks_ = Marks.of(rollouts, KIND)
    assert (marks_.oldest, marks_.newest) == ([9, 4], [9, 4])
    assert [(row["prompt_tokens"], row["response_tokens"]) for row in outline(rollouts, KIND)[0]] == [(2, 3)] * 2


def test_an_expired_response_leaves_a_copy_of_the_prompt(torch: ModuleType) -> None:
    reset = rollout(torch, tokens=torch.tensor([1, 2, 5, 6, 7]))
    reset_response(reset, KIND)
    assert torch.equal(reset["tokens"], reset["prompt_ids"])
    assert reset["tokens"] is not reset["prompt_ids"]


def test_stale_tokens_are_masked_in_tensors(torch: ModuleType) -> None:
    steps = torch.tensor([0, 7, 7])
    for mask, expected in (
        (None, torch.tensor([0, 1, 1], dtype=torch.int32)),
        (torch.tensor([True, True, False]), torch.tensor([False, True, False])),
        (torch.tensor([1.0, 1.0, 0.0], dtype=torch.bfloat16), torch.tensor([0.0, 1.0, 0.0], dtype=torch.bfloat16)),
    ):
        masked = rollout(torch, response_model_steps=steps, response_mask=mask)
        mask_stale_tokens([masked], 3, KIND)
        assert same_tensor(masked["response_mask"], expected)
        assert mask is None or mask[0]


def test_a_tensor_that_rollouts_share_comes_back_as_one_and_is_stored_once(torch: ModuleType) -> None:
    shared, equal = torch.arange(5000), torch.arange(5000)
    group = [{"a": tensor, "n": number} for number, tensor in enumerate((shared, [shared], equal))]
    payload = DICTS.encode(group)
    assert len(payload) < shared.nbytes + 1000
    first, second, third = (member["a"] for member in DICTS.decode(payload))
    assert first is second[0]
    assert first.data_ptr() != third.data_ptr()
    assert same_tensor(third, equal)
