"""The trainer. Its dataset only counts: prompts come from the generators."""

from datasets import Dataset
from rollouts import FromBuffer, last_saved
from trl import GRPOConfig, GRPOTrainer

from replaybuf import ReplayBufferConfig


def reward(reward, number, trainer_state, **columns):
    print(f"step {trainer_state.global_step + 1} trains prompts {sorted(set(number))}", flush=True)
    return reward  # as the generator gave it


args = GRPOConfig(
    output_dir="run",
    max_steps=10,
    save_steps=2,
    num_generations=4,
    per_device_train_batch_size=16,  # 4 groups of 4
    learning_rate=1e-3,
    use_cpu=True,
    report_to="none",
)
with ReplayBufferConfig(url="sqlite:///run.db", policy="fifo").build_sync() as buffer:
    source = FromBuffer(buffer)
    trainer = GRPOTrainer(
        model="model",
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["-"] * 16}),
        rollout_func=source.rollouts,
        callbacks=[source],
    )
    trainer.train(resume_from_checkpoint=last_saved())
