"""Puts groups into the buffer, in place of rollout workers."""

import asyncio

from replaybuf import ReplayBufferConfig, RolloutState, Status

config = ReplayBufferConfig(url="sqlite:///torch.db", policy="fifo")


def group(number: int) -> list[RolloutState]:
    return [
        RolloutState(
            message=[{"role": "user", "content": f"{number}+5="}],
            prompt_ids=list(f"{number}+5=".encode()),
            response_ids=list(answer.encode()),
            logprobs=[-0.7] * len(answer),
            reward=float(answer == str(number + 5)),
            status=Status.COMPLETED,
        )
        for answer in (str(number + 5), "well, let me see", "13")
    ]


async def main() -> None:
    async with config.build() as buffer:
        for number in range(80):
            await buffer.put(group(number), "math")


if __name__ == "__main__":
    asyncio.run(main())
