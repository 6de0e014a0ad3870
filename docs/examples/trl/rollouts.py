"""GRPOTrainer's rollouts from a buffer: the trainer's callback and its `rollout_func`."""

from pathlib import Path

from transformers import TrainerCallback


def last_saved(default=None):
    saved = {
        int(path.parent.name[11:]): str(path.parent) for path in Path("run").glob("checkpoint-*/trainer_state.json")
    }
    return saved[max(saved)] if saved else default


class FromBuffer(TrainerCallback):
    """GRPOTrainer's rollouts come from a buffer, which goes back to the step of the weights when a run goes on."""

    def __init__(self, buffer, task_name="math"):
        self.buffer, self.task_name, self.leases = buffer, task_name, []

    def rollouts(self, prompts, trainer):
        sizes = {self.task_name: len(prompts) // trainer.num_generations}
        step = trainer.state.global_step + 1
        self.leases.append(self.buffer.lease_batch(sizes, timeout=600, current_train_step=step).begin())
        batch = [rollout for group in self.leases[-1].batch[self.task_name] for rollout in group]
        names = {"prompt_ids": "prompt_ids", "completion_ids": "response_ids", "logprobs": "logprobs"}
        names |= {"reward": "reward", "number": "group_id"}  # these two are for reward functions
        return {theirs: [getattr(rollout, ours) for rollout in batch] for theirs, ours in names.items()}

    def on_train_begin(self, args, state, control, **kwargs):
        if not self.buffer.checkpoints():
            self.buffer.checkpoint(0)
        self.buffer.restore(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self.leases.pop(0).acknowledge()  # the batch is trained
        if control.should_save:
            self.buffer.checkpoint(state.global_step)  # first the buffer, then, by TRL, the weights
