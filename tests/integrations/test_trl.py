"""docs/examples/trl: TRL's own trainers, with rollouts from a buffer."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.integrations.scripts import files_of, lines_of, start, until, write
from tests.scripts import Program

pytestmark = pytest.mark.frameworks

#: What the scripts import, which takes seconds.
MODULES = ("transformers.models.qwen2.modeling_qwen2", "trl.trainer.grpo_trainer", "trl.experimental.async_grpo")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("trl")
    write("trl", tmp_path)
    with Program("tiny_model.py", cwd=tmp_path, modules=MODULES) as program:
        printed, _ = program.communicate(timeout=300)
    assert program.returncode == 0, printed
    return tmp_path


def trained(log: Path) -> dict[int, list[int]]:
    """Return the prompts of each step; of a step that was made again, since its weights were lost, the last ones."""
    lines = re.findall(r"step (\d+) trains prompts (\[.*?\])", log.read_text())
    return {int(step): json.loads(prompts) for step, prompts in lines}


#: What of AsyncGRPOTrainer needs CUDA, in torch; then the script of docs/examples.
ON_A_CPU = """
import runpy
from types import SimpleNamespace

import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing


def attention(q, k, v, cu_q, cu_k, *_, softmax_scale, **__):
    parts = []
    for begin, end, first, last in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]):
        seen = torch.ones(end - begin, last - first, dtype=torch.bool).tril((last - first) - (end - begin))
        heads = (part.transpose(0, 1) for part in (q[begin:end], k[first:last], v[first:last]))
        options = {"attn_mask": seen, "scale": softmax_scale, "enable_gqa": True}
        parts.append(torch.nn.functional.scaled_dot_product_attention(*heads, **options).transpose(0, 1))
    return torch.cat(parts)


packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1e12
before = async_grpo_trainer.AsyncGRPOTrainer.compute_loss


def compute_loss(self, model, inputs, *arguments, **options):
    lease = self.rollout_worker.leases[0]
    numbers = sorted(group[0].group_id for group in lease.batch["math"])
    print(f"step {self.state.global_step + 1} trains prompts {numbers}", flush=True)
    return before(self, model, inputs, *arguments, **options)


async_grpo_trainer.AsyncGRPOTrainer.compute_loss = compute_loss
runpy.run_path("async_train.py", run_name="__main__")
"""


@pytest.mark.parametrize(("script", "last"), [("train.py", 10), ("on_a_cpu.py", 9)], ids=["GRPO", "AsyncGRPO"])
def test_a_trainer_that_is_killed_goes_on_and_every_prompt_is_trained_once(
    folder: Path, script: str, last: int
) -> None:
    (folder / "on_a_cpu.py").write_text(ON_A_CPU)
    log = folder / f"{script}.log"
    generator, trainer = (start(name, folder, MODULES) for name in ("generate.py", script))
    try:
        until(lambda: "step 6 trains" in log.read_text(), "the trainer was in step 6", trainer, generator)
        trainer.kill()
        assert trainer.wait() == -signal.SIGKILL
        killed_log = log.read_text()
        trainer = start(script, folder, MODULES)
        assert trainer.wait(timeout=240) == 0, log.read_text()
        assert generator.poll() is None
    finally:
        for process in (trainer, generator):
            process.kill()
            process.wait()
    later_log = log.read_text()[len(killed_log) :]
    assert re.findall(r"step (\d+) trains", later_log)[0] in ("3", "5", "7")  # after the last step that was saved whole
    steps = trained(log)
    assert sorted(steps) == list(range(1, last + 1))
    assert sorted(number for prompts in steps.values() for number in prompts) == list(range(4 * last))
    norms = [float(norm) for norm in re.findall(r"'grad_norm': '?([-\w.]+)", log.read_text())]
    assert all(norm == norm for norm in norms)  # none is NaN
    assert any(norms)


@pytest.mark.parametrize("file", ["rollouts.py", "async_rollouts.py"])
def test_the_lines_of_the_user_are_few(file: str) -> None:
    assert lines_of(files_of("trl")[file]) <= 32
