"""The page at /ui in a real browser."""

from __future__ import annotations

import base64
import shutil
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from tests.system.client import get
from tests.system.networks import networks
from tests.system.scripted_server import FILES, Script, scripted_server
from tests.system.server import PATIENCE, ServerProcess, serving

RED = (  # a PNG of one red pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
INPUT = "#chat > form textarea"
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
    with networks(changed=False):
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        try:
            yield driver
        finally:
            driver.quit()


@pytest.fixture(scope="module")
def demo() -> Iterator[ServerProcess]:
    with serving() as server:
        yield server


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted_server() as script:
        yield script


class Page:
    """One visit."""

    def __init__(self, browser: webdriver.Chrome, url: str, tab: str) -> None:
        self.browser = browser
        browser.get("about:blank")  # a change of the fragment alone would not load it anew
        browser.get_log("browser")  # what a visit before complained of
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

        try:
            result = WebDriverWait(self.browser, PATIENCE).until(found)
        except TimeoutException as error:
            shown = self.one("body").text
            raise AssertionError(f"{self.complaints()}, and it shows {shown[:500]!r}") from error
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
    page.one(INPUT).send_keys("What is the capital of France?\n")
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
    # As the page asks by itself, one answer of a hundred ends at once, and has no token to show.
    page.one("#settings [name=temperature]").clear()
    page.one("#settings [name=temperature]").send_keys("0")
    page.one("#complete .send").click()
    page.wait("#complete .receipt", "tokens/s")
    assert "<b>bold</b>" in page.one("#complete .message").text  # text, never markup
    assert page.all("#complete .token")

    page = Page(browser, demo.url, "watch")
    page.wait("#state", "Serving")
    assert len(page.all("#plots canvas")) == 9
    page.wait("#plots figcaption b", "0")
    assert page.complaints() == []


def test_a_model_that_cannot_be_asked_for_is_asked_for_again(
    browser: webdriver.Chrome, script: Script
) -> None:
    script.away = True
    page = Page(browser, script.url, "chat")
    page.wait("#model", "Failed to fetch")
    script.away = False
    page.wait("#model", "script")


def test_errors_are_shown_and_a_key_helps(browser: webdriver.Chrome) -> None:
    with serving("--api-key", "sesame", "--served-model-name", "amber", fake="{}") as server:
        page = Page(browser, server.url, "chat")
        assert page.wait("#model", "amber").text == "amber"
        page.wait(INPUT).send_keys("hello\n")
        page.wait("#chat .error", "401")
        page.one("#settings [name=key]").send_keys("sesame\t")
        page.one("#settings [name=max_tokens]").clear()
        page.one("#settings [name=max_tokens]").send_keys("8")
        page.one(INPUT).send_keys("hello\n")
        page.wait("#chat .receipt", "8 tokens")


def test_stop_cancels_the_request(browser: webdriver.Chrome) -> None:
    """Of an answer that would take minutes: however slow a browser is, there is time to stop it."""
    with serving(fake='{"step_ms": 300}') as server:
        page = Page(browser, server.url, "chat")
        page.wait(INPUT).send_keys("hello\n")
        page.wait("#chat .assistant .token")
        page.wait("#chat .stop").click()
        page.wait("#chat .send")
        server.wait_idle()
        accepted, ended = server.books()
        assert accepted == ended == 1
        assert server.metric('tgi_request_cancelled{phase="decode"}') == 1


def test_thoughts_stream_and_are_folded_when_the_answer_begins(
    browser: webdriver.Chrome, script: Script
) -> None:
    page = Page(browser, script.url, "chat")
    page.wait(INPUT).send_keys("Which port?\n")
    assert "chat_template_kwargs" not in script.asked()
    script.say(role="assistant", content="")
    script.say(reasoning_content="The question is ", reasoning="The question is ")
    script.say(reasoning_content="about <b>ports</b>.", reasoning="about <b>ports</b>.")
    thoughts = page.wait("#chat .thoughts", "about <b>ports</b>.")
    fold, summary = page.one("#chat details.thought"), page.one("#chat .thought summary")
    assert fold.get_attribute("open") is not None
    assert "Thinking" in summary.text
    script.say(content="It is 3000.")
    page.wait("#chat .assistant", "It is 3000.")
    assert fold.get_attribute("open") is None
    assert not thoughts.is_displayed()
    assert summary.text == "Thought"
    script.end()
    page.wait("#chat .receipt", "3 tokens")
    summary.send_keys(" ")  # the keyboard unfolds it
    assert page.wait("#chat .thoughts").text == "The question is about <b>ports</b>."

    Select(page.one("#settings [name=thinking]")).select_by_value("on")
    page.one(INPUT).send_keys("And why?\n")
    asked = script.asked()
    assert asked["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    assert asked["messages"] == [
        {"role": "user", "content": "Which port?"},
        {
            "role": "assistant",
            "content": "It is 3000.",
            "reasoning_content": "The question is about <b>ports</b>.",
        },
        {"role": "user", "content": "And why?"},
    ]
    script.say(reasoning="No content_field.")  # the other name alone
    page.wait("#chat .thoughts", "No content_field.")
    opened = page.all("#chat .thought summary")[1]
    opened.click()
    opened.click()
    script.say(content="Because.")
    page.wait("#chat .assistant", "Because.")
    assert page.all("#chat details.thought")[1].get_attribute("open") is not None
    script.end()
    assert page.complaints() == []


def test_pictures_are_chosen_dropped_and_pasted_and_go_with_the_next_message(
    browser: webdriver.Chrome, script: Script, tmp_path: Path
) -> None:
    page = Page(browser, script.url, "chat")
    file = tmp_path / "red.png"
    file.write_bytes(base64.b64decode(RED))
    page.wait(INPUT)
    page.one("#chat .files").send_keys(str(file))
    page.wait("#chat .attachment img")
    hand_over = """
        const bytes = Uint8Array.from(atob(arguments[0]), letter => letter.charCodeAt(0));
        const data = new DataTransfer();
        data.items.add(new File([bytes], "red.png", { type: "image/png" }));
        data.items.add(new File(["text"], "notes.txt", { type: "text/plain" }));
        const options = { bubbles: true, cancelable: true };
        const event = arguments[1] === "drop"
          ? new DragEvent("drop", { ...options, dataTransfer: data })
          : new ClipboardEvent("paste", { ...options, clipboardData: data });
        document.querySelector("#chat form textarea").dispatchEvent(event);
    """
    for count, how in [(2, "drop"), (3, "paste")]:
        browser.execute_script(hand_over, RED, how)
        page.wait(f"#chat .attachment:nth-of-type({count}) img")
    page.one("#chat .attachment:nth-of-type(2)").click()  # taken back
    page.one(INPUT).send_keys("What is it?\n")
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED}"}}
    content = [picture, picture, {"type": "text", "text": "What is it?"}]
    assert script.asked()["messages"] == [{"role": "user", "content": content}]
    assert len(page.all("#chat .user img")) == 2 and not page.all("#chat .attachment")
    script.say(content="Red.")
    script.end()
    page.wait("#chat .assistant", "Red.")
    page.wait("#chat .send")  # before the answer has ended nothing is sent
    page.one(INPUT).send_keys("Sure?\n")
    messages = script.asked()["messages"]
    assert messages[0]["content"] == content and messages[2]["content"] == "Sure?"
    script.end()
    assert page.complaints() == []


def test_sounds_and_videos_go_with_the_next_message(
    browser: webdriver.Chrome, script: Script, tmp_path: Path
) -> None:
    page = Page(browser, script.url, "chat")
    sound, video = tmp_path / "beep.wav", tmp_path / "cut off.mp4"
    with wave.open(str(sound), "wb") as writer:
        writer.setparams((1, 2, 8000, 0, "NONE", ""))
        writer.writeframes(bytes(1600))
    video.write_bytes(b"\0\0\0\x18ftypmp42")
    page.wait(INPUT)
    for count, file in enumerate((sound, video), 1):
        page.one("#chat .files").send_keys(str(file))
        page.wait(f"#chat .attachment:nth-of-type({count})", file.name)
    page.one(INPUT).send_keys("What is it?\n")
    found = script.asked()["messages"][0]["content"]
    assert [part["type"] for part in found] == ["audio_url", "video_url", "text"]
    for part, name, file in zip(found[:2], ("audio/", "video/"), (sound, video), strict=True):
        kind, _, data = part[part["type"]]["url"].partition(";base64,")
        assert kind.startswith(f"data:{name}") and base64.b64decode(data) == file.read_bytes()
    page.wait("#chat .user video[controls]")
    page.wait("#chat .user audio[controls]")
    length = "return document.querySelector('#chat .user audio').duration"
    WebDriverWait(browser, PATIENCE).until(lambda _: browser.execute_script(length) == 0.1)
    script.say(content="A beep.")
    script.end()
    page.wait("#chat .assistant", "A beep.")
    assert page.complaints() == []


def test_calls_wait_for_results_that_a_person_types(
    browser: webdriver.Chrome, script: Script
) -> None:
    page = Page(browser, script.url, "chat")
    page.wait("#example").click()
    page.one(INPUT).send_keys("How is the weather?\n")
    tools = [tool["function"]["name"] for tool in script.asked()["tools"]]
    assert "get_weather" in tools
    script.say(reasoning_content="I look it up.")
    script.call(0, id="call_a", name="get_weather", arguments="")
    script.call(0, arguments='{"city":')
    code = page.wait("#chat .call .arguments", '{"city":')
    script.call(0, arguments='"Rome"}')
    script.call(1, id="call_b", name="get_weather", arguments='{"city":"Oslo"}')
    page.wait("#chat .call:nth-of-type(2) .arguments", "Oslo")
    assert code.text == '{\n  "city": "Rome"\n}'
    assert page.one("#chat details.thought").get_attribute("open") is None
    assert not page.all("#chat .result")  # not before all is said
    script.end()
    page.wait("#chat .result")
    focused = browser.switch_to.active_element  # nobody needs a mouse
    assert focused.get_attribute("class") == "result"
    focused.send_keys("21 degrees", Keys.TAB)
    browser.switch_to.active_element.send_keys(Keys.TAB)  # its arguments can be scrolled
    browser.switch_to.active_element.send_keys("snow\n")
    asked = script.asked()["messages"]
    assert asked[0] == {"role": "user", "content": "How is the weather?"}
    assert asked[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I look it up.",
        "tool_calls": [
            {
                "id": f"call_{name}",
                "type": "function",
                "function": {"name": "get_weather", "arguments": f'{{"city":"{city}"}}'},
            }
            for name, city in (("a", "Rome"), ("b", "Oslo"))
        ],
    }
    assert asked[2:] == [
        {"role": "tool", "tool_call_id": "call_a", "content": "21 degrees"},
        {"role": "tool", "tool_call_id": "call_b", "content": "snow"},
    ]
    script.say(content="Warm in Rome, snow in Oslo.")
    script.end()
    page.wait("#chat .assistant", "snow in Oslo.")
    assert all(box.get_attribute("readonly") for box in page.all("#chat .result"))
    assert not any(button.is_displayed() for button in page.all("#chat .calls button"))
    assert page.complaints() == []


def test_a_message_instead_of_a_result_tells_the_model_so(
    browser: webdriver.Chrome, script: Script
) -> None:
    page = Page(browser, script.url, "chat")
    page.wait(INPUT).send_keys("What is 2 + 2?\n")
    script.asked()
    script.call(0, id="call_a", name="calculate", arguments="{}")
    script.end()
    page.wait("#chat .result")
    page.one("#settings [name=tools]").send_keys("[1,")
    page.one(INPUT).send_keys("Never mind.\n")
    page.wait("#chat .error", "Tools: ")  # nothing was sent, and the call still waits
    assert page.wait("#chat .calls button").is_displayed()
    page.one("#settings [name=tools]").clear()
    page.one(INPUT).send_keys("Never mind.\n")
    messages = script.asked()["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "user"]
    assert messages[2]["content"] == "There is no result."
    script.say(content="Very well.")
    script.end()
    page.wait("#chat .assistant", "Very well.")


def test_the_page_asks_for_nothing_from_elsewhere(demo: ServerProcess) -> None:
    answer = get(f"{demo.url}/ui")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "http" not in answer.text
    names = [path.name for path in FILES.iterdir() if path.name != "index.html"]
    assert len(names) > 5
    for name in names:
        part = get(f"{demo.url}/ui/{name}")
        assert part.status_code == 200
        assert "://" not in part.text
    assert get(f"{demo.url}/ui/other.js").status_code == 404
