"""The calls of NeMo-RL to its replay buffer."""

from nemo_rl.distributed.batched_data_dict import BatchedDataDict

from replaybuf.integrations.nemo_rl import TrajectoryBuffer

buffer = TrajectoryBuffer("sqlite:///run.db", max_size=3)
for version, target in [(0, 1), (1, 1), (1, 2), (1, 2)]:
    batch = BatchedDataDict({"loss_multiplier": [1.0], "total_reward": [0.5 * version]})
    print(buffer.add({"batch": batch, "rollout_metrics": {}}, version, target), end=" ")
print(buffer.get_trajectories_needed(2, num_prompts_per_step=2))

taken = buffer.sample(num_prompt_groups=2, current_weight_version=1, max_age_steps=1)
print([trajectory["batch"]["total_reward"] for trajectory in taken["trajectories"]], taken["avg_trajectory_age"])

buffer.save_to_path("replay_buffer.pt")  # a step checkpoint in the database; the file only names it
buffer.add({"batch": batch, "rollout_metrics": {}}, 1, 2)
again = TrajectoryBuffer("sqlite:///run.db", max_size=3)  # the run is started again, from the checkpoint
print(again.load_from_path("replay_buffer.pt", 2, current_training_step=2, max_age_steps=1)["num_trajectories"])

# Prints:
# success success success full 1
# [[0.0], [0.5]] 0.5
# 1
