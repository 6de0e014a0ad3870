"""docs/frameworks/configs.md, with the real packages; REPLAYBUF_TEST_UPDATE_DOCS=1 writes its outputs anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.scripts import files_of, run

pytestmark = pytest.mark.frameworks

NEEDS = {"with_hydra.py": "hydra", "trl_arguments.py": "trl", "verl_config.py": "verl"}


@pytest.mark.parametrize("script", files_of("configs.md"))
def test_a_config_is_read_as_the_page_says(script: str, tmp_path: Path) -> None:
    if script in NEEDS:
        pytest.importorskip(NEEDS[script])
    run("configs.md", script, tmp_path)
