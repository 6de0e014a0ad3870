"""A real Chromium without a window, and the server that it looks at.

`chromium` and `chromedriver` are found on the path (Debian: the packages chromium and chromium-driver). Where they, or
the extra `browser`, are missing, tests fail: this tier is run to see the page in a browser.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import COMMAND
from tests.scripts import Script
from tests.web.conftest import HOSTILE_UID, LONG, LONG_UID, SCRIPT

_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)


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
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        chrome.set_page_load_timeout(30)
        yield chrome
    finally:
        chrome.quit()


@contextmanager
def serving(url: str, *arguments: str) -> Iterator[str]:
    """Yield the address at which `replaybuf serve` shows a database; in the end it is interrupted."""
    process = Script(COMMAND, "serve", url, "--port", "0", *arguments)
    try:
        match = re.search(r"http://\S+", process.stdout.readline())
        assert match is not None, process.end()
        yield match[0].rstrip("/")
    finally:
        process.send_signal(signal.SIGINT)
        code, _, errors = process.end(20)
    assert (code, errors) == (130, "")


def requests_of(driver: Any) -> list[str]:
    """Return the addresses that were asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [sent["params"]["request"]["url"] for sent in messages if sent["method"] == "Network.requestWillBeSent"]


def show(driver: Any, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
    """Set the size of the screen and what the system prefers."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


pytestmark = pytest.mark.web

PATHS = (
    *(
        "/",
        "/groups",
        "/groups/1",
        f"/groups/{HOSTILE_UID}",
        f"/groups/{LONG_UID}",
        "/steps",
        "/steps/413",
    ),
    *("/workers", "/nix"),
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as chrome:
        yield chrome


@pytest.fixture(scope="module")
def address(reader: str) -> Iterator[str]:
    with serving(reader) as served:
        yield served


@pytest.fixture(autouse=True)
def _as_usual(driver: Any) -> None:
    show(driver)
    driver.get("about:blank")
    driver.get_log("browser")
    requests_of(driver)


def find(driver: Any, selector: str) -> Any:
    """Return an element, as soon as it is there: a click may lead to another page."""
    wait(driver, f"document.querySelector({json.dumps(selector)}) !== null")
    return driver.find_element("css selector", selector)


def text_of(driver: Any) -> str:
    return str(driver.execute_script("return document.body.innerText"))


def press(driver: Any, *keys: str) -> None:
    """Press keys as on a keyboard: whatever has the focus gets them, also while it changes."""
    from selenium.webdriver import ActionChains

    for key in keys:
        ActionChains(driver).send_keys(key).perform()


def wait(driver: Any, condition: str) -> None:
    """Wait until a condition holds in the page."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 15).until(lambda d: d.execute_script(f"return {condition}"), f"waited for {condition}")


def test_the_menu_leads_to_every_page_and_groups_to_their_rollouts(driver: Any, address: str) -> None:
    driver.get(address)
    for name in ("Groups", "Steps", "Workers", "Overview"):
        driver.find_element("link text", name).click()
        assert find(driver, "h1").text.startswith(name)
        assert find(driver, "nav [aria-current]").text == name
    driver.find_element("link text", "Groups").click()
    find(driver, "td a").click()
    assert find(driver, "h1").text.startswith("Group ")


def test_a_plot_tells_its_values_to_the_pointer_and_to_the_keys(driver: Any, address: str) -> None:
    from selenium.webdriver import ActionChains

    driver.get(f"{address}/steps")
    canvas = find(driver, ".plot .canvas")
    ActionChains(driver).move_to_element(canvas).perform()
    wait(driver, "/^step 4\\d\\d *mean 0.25/.test(document.querySelector('.readout').innerText)")
    driver.execute_script("arguments[0].focus()", canvas)
    press(driver, "\ue010", "\ue012")  # End, left
    wait(driver, "document.querySelector('.readout').innerText.startsWith('step 458')")
    press(driver, "\ue00c")  # Escape
    wait(driver, "document.querySelector('.readout').innerText === ''")


def test_hostile_rollouts_stay_texts(driver: Any, address: str) -> None:
    for path in PATHS:
        driver.get(address + path)
        assert "broken in" not in driver.title
        assert not driver.find_elements("css selector", "main script, main img, main iframe, main [onerror]")
    driver.get(f"{address}/groups/{HOSTILE_UID}")
    text = text_of(driver)
    for text_shown in (SCRIPT, r"abc\u202edef", r"\x1b[31mred", r"NUL:\x00", r"surrogate:\ud800"):
        assert text_shown in text


def test_a_line_of_a_megabyte_is_cut(driver: Any, address: str) -> None:
    driver.get(f"{address}/groups/{LONG_UID}")
    assert LONG not in text_of(driver)
    assert is_narrow(driver)


def test_nothing_else_is_asked_for_and_nothing_is_refused(driver: Any, address: str) -> None:
    for path in PATHS:
        driver.get(address + path)
    requests = [request for request in requests_of(driver) if not request.startswith("about:")]
    assert requests
    assert all(request.startswith((address, "data:")) for request in requests), requests
    complaints = [entry["message"] for entry in driver.get_log("browser") if "404" not in entry["message"]]
    assert not complaints


def brightness(driver: Any, selector: str, place: str) -> float:
    """Return the relative luminance of a colour of an element, from 0 to 1."""
    colour = driver.execute_script(
        "const c = document.createElement('canvas').getContext('2d');"
        "c.fillStyle = getComputedStyle(document.querySelector(arguments[0]))[arguments[1]];"
        "c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data]",
        selector,
        place,
    )
    parts = [value / 255 for value in colour[:3]]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in parts]
    return sum(share * channel for share, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_follow_the_system(driver: Any, address: str, dark: bool) -> None:
    show(driver, dark=dark)
    driver.get(address)
    assert (brightness(driver, "body", "backgroundColor") < 0.2) == dark


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(
    ("path", "selector", "ground"),
    [
        ("/", "main .quiet", "body"),
        ("/", "td a", ".scroll"),
        ("/", "thead th", ".scroll"),
        ("/groups?where=x", ".mistake", ".mistake"),
        ("/groups/1", ".tokens .lp3", ".tokens .lp3"),
        ("/groups/1?by=mask", ".tokens .mask0", "article"),
        ("/groups/1?by=step", ".tokens .step0", ".tokens .step0"),
    ],
)
def test_texts_have_contrast(driver: Any, address: str, path: str, selector: str, ground: str, dark: bool) -> None:
    show(driver, dark=dark)
    driver.get(address + path)
    pair = sorted((brightness(driver, selector, "color"), brightness(driver, ground, "backgroundColor")))
    assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5


def is_narrow(driver: Any) -> bool:
    """Return whether the page is no wider than the screen."""
    return bool(driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"))


@pytest.mark.parametrize("width", [360, 1280, 1920])
def test_a_screen_of_any_width_shows_every_page_without_sideways_scrolling(
    driver: Any, address: str, width: int
) -> None:
    show(driver, width=width, height=740)
    for path in PATHS:
        driver.get(address + path)
        assert is_narrow(driver), path
    if width == 360:
        assert driver.execute_script("return window.innerWidth") == 360


def test_the_first_tab_skips_to_the_content(driver: Any, address: str) -> None:
    from selenium.webdriver import ActionChains

    driver.get(address)
    ActionChains(driver).send_keys("\ue004").perform()
    assert find(driver, ".skip") == driver.switch_to.active_element


def test_figures_follow_the_run_and_can_be_stopped(driver: Any, address: str) -> None:
    driver.get(address)
    driver.execute_script("document.querySelector('#figures h1').textContent = 'old'")
    wait(driver, "document.querySelector('#figures h1').textContent === 'Overview'")
    find(driver, "#live").click()
    wait(driver, "document.getElementById('live').getAttribute('aria-pressed') === 'false'")


def test_pages_can_be_read_without_scripts(driver: Any, address: str) -> None:
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        for path, expected in (("/", "Who waits, and why"), ("/groups/1", "What is 0 + 5?")):
            driver.get(address + path)
            assert expected in find(driver, "main").text
        assert not find(driver, "#live").is_displayed()
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_token_opens_the_page_and_leaves_its_address(driver: Any, filled: str) -> None:
    with serving(filled, "--host", "0.0.0.0") as printed:
        address, token = re.fullmatch(r"http://[^:]+(:\d+)/\?token=(.+)", printed).groups()  # type: ignore[union-attr]
        driver.get(f"http://127.0.0.1{address}/")
        assert "This page needs a token" in text_of(driver)
        find(driver, "input[name=token]").send_keys(token)
        find(driver, "main button").click()
        wait(driver, "document.querySelector('h1').textContent === 'Overview'")
        assert "token" not in driver.current_url
        assert driver.execute_script("return document.cookie") == ""
