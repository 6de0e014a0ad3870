"""Example scripts as processes, in a folder of their own, that can be killed and started again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from tests.scripts import Program

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples"


class Run:
    """The processes of one run of a script, by name."""

    def __init__(self, script: str, url: str, folder: Path) -> None:
        self._script = EXAMPLES / script
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "REPLAYBUF_URL": url}
        self._folder = folder
        self.processes: dict[str, Program] = {}

    def start(self, name: str, *arguments: str) -> None:
        with self._output(name).open("ab") as output:
            self.processes[name] = Program(
                str(self._script), *arguments, cwd=self._folder, env=self._environment, stdout=output
            )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def end(self) -> None:
        for name in self.processes:
            self.kill(name)

    def weights(self) -> dict[str, object]:
        """What the trainer has saved last; empty before the first time."""
        files = list(self._folder.glob("*-weights.json"))
        return json.loads(files[0].read_text()) if files else {}

    def wait_for(self, step: int, name: str) -> None:
        """Wait until the weights are those of a step, or the process that saves them has ended."""
        while int(str(self.weights().get("step", -1))) < step and self.processes[name].poll() is None:
            time.sleep(0.005)

    def printed(self) -> str:
        return "".join(self._output(name).read_text() for name in self.processes)

    def _output(self, name: str) -> Path:
        return self._folder / f"{name}.out"
