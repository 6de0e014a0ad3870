"""A generator, of which any number may run, with the newest weights that the trainer has saved."""

import asyncio

import torch
from rollouts import last_saved
from transformers import AutoModelForCausalLM, AutoTokenizer

from replaybuf import FencedError, ReplayBufferConfig, Status
from replaybuf.produce import JSONLines, Sampler

tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained(last_saved("model"))
config = ReplayBufferConfig(url="sqlite:///run.db", policy="fifo", capacity=16, on_full="block")


def generate(group):
    """Fill in the rollouts of a group, all of one prompt."""
    ids = tokenizer(group[0].message[0]["content"])["input_ids"]
    options = {"do_sample": True, "top_k": 0, "output_scores": True, "return_dict_in_generate": True}
    out = model.generate(torch.tensor([ids] * len(group)), max_new_tokens=8, **options)
    logprobs = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    for rollout, tokens, scores in zip(group, out.sequences[:, len(ids) :].tolist(), logprobs.tolist(), strict=True):
        end = [*tokens, tokenizer.eos_token_id].index(tokenizer.eos_token_id) + 1
        rollout.prompt_ids, rollout.response_ids, rollout.logprobs = ids, tokens[:end], scores[:end]
        rollout.response = tokenizer.decode(tokens)
        rollout.reward = float(rollout.reward_model["ground_truth"] in rollout.response)
        rollout.reward += sum(map(str.isdigit, rollout.response)) / len(tokens)  # something to learn at the beginning
        rollout.status = Status.COMPLETED


async def main():
    while True:
        async with config.build() as buffer:
            sampler = Sampler(buffer, JSONLines("math.jsonl"), "math", prompt_repeat_k=4, epochs=1, seconds=5)
            try:
                while True:
                    for prompt in await sampler.draw(1) or await asyncio.sleep(1, []):
                        generate(prompt.group)
                        await prompt.finish()
            except FencedError:  # the trainer was restored to its last checkpoint: join its run
                continue


asyncio.run(main())
