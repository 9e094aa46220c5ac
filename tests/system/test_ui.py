"""The page at /ui in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.system.client import get
from tests.system.server import PATIENCE, ServerProcess, serving

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with chromedriver here"),
]

FLAGS = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    "disable-component-update disable-sync disable-dev-shm-usage window-size=1280,800"
).split()


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def demo() -> Iterator[ServerProcess]:
    with serving() as server:
        yield server


class Page:
    """One visit."""

    def __init__(self, browser: webdriver.Chrome, url: str, tab: str) -> None:
        self.browser = browser
        browser.get("about:blank")  # a change of the fragment alone would not load it anew
        browser.get(f"{url}/ui#{tab}")

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def wait(self, selector: str, text: str = "") -> WebElement:
        """Return the first element that is shown and holds `text`, once there is one."""

        def found(_: object) -> WebElement | bool:
            shown = (e for e in self.all(selector) if e.is_displayed() and text in e.text)
            return next(shown, False)

        result = WebDriverWait(self.browser, PATIENCE).until(found)
        assert isinstance(result, WebElement)
        return result

    def point_at(self, element: WebElement) -> None:
        ActionChains(self.browser).move_to_element(element).perform()

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]


def test_a_chat_streams_and_tells_its_chances(
    browser: webdriver.Chrome, demo: ServerProcess
) -> None:
    page = Page(browser, demo.url, "chat")
    page.wait("#model", "tgi-trio/demo")
    page.one("#settings [name=temperature]").clear()
    page.one("#settings [name=temperature]").send_keys("0")
    page.one("#chat textarea").send_keys("What is the capital of France?\n")
    page.wait("#chat .receipt", "tokens/s")
    answer = page.one("#chat .assistant")
    assert "Paris" in answer.text
    tokens = page.all("#chat .assistant .token")
    assert len(tokens) > 3
    page.point_at(next(token for token in tokens if token.text.strip()))
    chances = page.wait("#chances")
    assert chances.find_element(By.CSS_SELECTOR, ".chosen .share").text.endswith("%")
    assert len(chances.find_elements(By.CSS_SELECTOR, ".chance")) == 5
    page.one("#chat .reset").click()
    assert not page.all("#chat .message")
    assert page.complaints() == []


def test_a_completion_and_the_dashboard(browser: webdriver.Chrome, demo: ServerProcess) -> None:
    page = Page(browser, demo.url, "complete")
    page.wait("#complete textarea").send_keys("Continuous batching is <b>bold</b>")
    page.one("#complete .send").click()
    page.wait("#complete .receipt", "tokens/s")
    assert "<b>bold</b>" in page.one("#complete .message").text  # text, never markup
    assert page.all("#complete .token")

    page = Page(browser, demo.url, "watch")
    page.wait("#state", "Serving")
    assert len(page.all("#plots canvas")) == 9
    page.wait("#plots figcaption b", "0")
    assert page.complaints() == []


def test_errors_are_shown_and_a_key_helps(browser: webdriver.Chrome) -> None:
    with serving("--api-key", "sesame", fake="{}") as server:
        page = Page(browser, server.url, "chat")
        page.wait("#chat textarea").send_keys("hello\n")
        page.wait("#chat .error", "401")
        page.one("#settings [name=key]").send_keys("sesame\t")
        page.one("#settings [name=max_tokens]").clear()
        page.one("#settings [name=max_tokens]").send_keys("8")
        page.one("#chat textarea").send_keys("hello\n")
        page.wait("#chat .receipt", "8 tokens")


def test_stop_cancels_the_request(browser: webdriver.Chrome) -> None:
    with serving(fake='{"step_ms": 30}') as server:
        page = Page(browser, server.url, "chat")
        page.wait("#chat textarea").send_keys("hello\n")
        page.wait("#chat .assistant .token")
        page.wait("#chat .stop").click()
        page.wait("#chat .send")
        server.wait_idle()
        accepted, ended = server.books()
        assert accepted == ended == 1
        assert server.metric('tgi_request_cancelled{phase="decode"}') == 1


def test_the_page_asks_for_nothing_from_elsewhere(demo: ServerProcess) -> None:
    answer = get(f"{demo.url}/ui")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "http" not in answer.text
    for name in ("page.css", "page.js", "server.js", "chances.js", "dashboard.js"):
        part = get(f"{demo.url}/ui/{name}")
        assert part.status_code == 200
        assert "://" not in part.text
    assert get(f"{demo.url}/ui/other.js").status_code == 404
