"""A real Chromium without a window, and the server that it looks at.

`chromium` and `chromedriver` are found on the path (Debian: the packages chromium and chromium-driver). Where they, or
the extra `browser`, are missing, tests fail: this tier is run to see the page in a browser.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
_ROOT = Path(__file__).parents[2]


@contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """Yield a driver of Selenium's, with a new profile in the folder."""
    from selenium import webdriver

    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert browser, "there is no chromium on the path: apt-get install chromium"
    assert driver, "there is no chromedriver on the path: apt-get install chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (*_ARGUMENTS, f"--user-data-dir={folder}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        found.set_page_load_timeout(30)
        yield found
    finally:
        found.quit()


@contextmanager
def serving(url: str, *arguments: str) -> Iterator[str]:
    """Yield the address at which `replaybuf serve` shows a database; in the end it is interrupted."""
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, "-m", "replaybuf", "serve", url, "--port", "0", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, process.communicate()[1]
            yield found[0].rstrip("/")
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == ""


def requests_of(driver: Any) -> list[str]:
    """Return the addresses that were asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]


def show(driver: Any, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
    """Set the size of the screen and what the system prefers."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
