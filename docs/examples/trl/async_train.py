"""AsyncGRPOTrainer with rollouts from the buffer."""

from types import SimpleNamespace

from async_rollouts import BufferedWorker
from datasets import Dataset
from rollouts import last_saved
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from replaybuf import ReplayBufferConfig

args = AsyncGRPOConfig(
    output_dir="run",
    max_steps=9,  # of 10 batches: it reads one ahead
    save_steps=2,
    num_generations=4,
    per_device_train_batch_size=16,  # 4 groups of 4
    token_budget=0,  # batches of a fixed number of rollouts
    learning_rate=1e-3,
    use_cpu=True,
    bf16=False,
    report_to="none",
)
nothing = {name: lambda: None for name in ("init_weight_transfer", "pause", "resume", "destroy")}
with ReplayBufferConfig(url="sqlite:///run.db", policy="fifo").build_sync() as buffer:
    worker = BufferedWorker(buffer, groups=4)
    trainer = AsyncGRPOTrainer(
        model="model",
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["-"] * 40}),
        rollout_worker=worker,
        weight_transfer=SimpleNamespace(send_weights=list, **nothing),  # leave it out if vLLM generates
        callbacks=[worker],
    )
    trainer.train(resume_from_checkpoint=last_saved())
