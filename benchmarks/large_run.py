"""What large runs ask of a buffer, reckoned from published figures: `python -m benchmarks.large_run`.

It prints the table of docs/large-runs.md. It multiplies, and measures nothing; `replaybuf bench --rate` measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Bytes of a token: its id and log-probability (4 each), a mask (1), and some 4 characters of text.
TOKEN_BYTES = 13
#: How often a payload is in the WAL: at the put, and once more when its pages are swept after a checkpoint of the
#: server, with what vacuum writes (measured on PostgreSQL 18 with checksums).
WAL_TIMES = 2.3
#: Of a group's row, with its indexes (docs/operating.md).
ROW_BYTES = 1_500
#: Connections of a process that puts one group at a time, and those that it has at most.
USUAL_CONNECTIONS, MOST_CONNECTIONS = 4, 16
#: What the disk keeps: batches ahead of the trainer, and step checkpoints.
BATCHES_KEPT = 6
#: What a row holds at most (`replaybuf.storage.sql.engine.dialect.MOST_ROW_BYTES`).
ROW_LIMIT = 999_000_000


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it was published. `tokens` is the mean length; `expert_bytes` those of a token's routed experts."""

    name: str
    source: str
    gpus: int
    engines: int  # processes that generate, and put
    groups: int  # of a step
    rollouts: int  # of a group
    tokens: int
    step_seconds: float
    expert_bytes: int = 0

    @property
    def groups_a_second(self) -> float:
        return self.groups / self.step_seconds

    def group_bytes(self, *, experts: bool) -> int:
        return self.rollouts * self.tokens * (TOKEN_BYTES + (self.expert_bytes if experts else 0))


_NEMO = "NeMo-RL 0.4, docs/about/performance-summary.md"
_VERL = "verl, docs/advance/fully_async.md"
#: Engines: half of the GPUs, which generate, divided by the tensor parallel size of generation.
RUNS = {
    "qwen3-30b": Run("Qwen3-30B-A3B, 1 step off", _NEMO, 32, 8, 64, 32, 3158, 244.0, 48 * 8),
    "qwen2.5-7b": Run("Qwen2.5-Math-7B, fully async", _VERL, 128, 64, 512, 16, 28_000, 150.6),
    "qwen3-235b": Run("Qwen3-235B, 1 step off", _NEMO, 256, 16, 16, 32, 5691, 241.0, 94 * 8),
    "deepseek-v3": Run("DeepSeek V3 (671B), 1 step off", _NEMO, 512, 8, 32, 16, 744, 77.9, 58 * 8),
    "agentic": Run(
        "Agentic, 300 s a trajectory", "verl #7579 (durations), slime run-deepseek-r1.sh (batch, longest answer)",
        128, 16, 128, 8, 32_768, 600.0, 58 * 8,
    ),
}  # fmt: skip


def reckoned(run: Run) -> dict[str, str]:
    """Return what a run asks for, as it is shown."""
    rate, plain, with_experts = run.groups_a_second, run.group_bytes(experts=False), run.group_bytes(experts=True)
    return {
        "run": run.name,
        "GPUs": str(run.gpus),
        "groups/s": f"{rate:.2f}",
        "a group": _size(plain),
        "with experts": _size(with_experts) if run.expert_bytes else "-",
        "MB/s": _pair(run, lambda size: f"{rate * size / 1e6:.1f}"),
        "WAL a day": _pair(run, lambda size: _size(86_400 * rate * size * WAL_TIMES)),
        "connections": f"{(run.engines + 1) * USUAL_CONNECTIONS} to {(run.engines + 1) * MOST_CONNECTIONS}",
        "disk": _pair(run, lambda size: _size(BATCHES_KEPT * run.groups * (size + ROW_BYTES))),
        "longest row": f"{ROW_LIMIT / with_experts:.0f} x" if with_experts < ROW_LIMIT else "over the limit",
    }


def _pair(run: Run, show: Any) -> str:
    plain = str(show(run.group_bytes(experts=False)))
    return f"{plain} / {show(run.group_bytes(experts=True))}" if run.expert_bytes else plain


def _size(count: float) -> str:
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count:.3g} PB"


def table() -> str:
    """Return the reckoning of all runs as Markdown."""
    rows = [reckoned(run) for run in RUNS.values()]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
