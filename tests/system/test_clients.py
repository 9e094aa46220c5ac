"""`chat` and `bench` as people use them, with a server of their own and with one that runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tests.support.warm_start import run_warm
from tests.system.scripted_server import scripted_server
from tests.system.server import serving

pytestmark = pytest.mark.system


def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return run_warm("-m", "tgi_trio", *words, text=text)


def test_a_chat_with_a_server_of_its_own() -> None:
    said = "What is the capital of France?\n/reset\n/what\nAnd of Spain?\n/quit\nnever said\n"
    done = run("chat", "--temperature", "0", text=said)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.split("> ")
    assert first.startswith("tgi-trio/demo at unix:")
    answers = [answer.strip() for answer in rest]
    assert "Paris" in answers[0]
    assert answers[2].startswith("/reset")
    assert len(answers) == 5  # and /quit prints nothing
    assert answers[3]
    assert "never" not in done.stdout


def test_a_chat_ends_with_its_input_and_survives_errors() -> None:
    with serving(fake="{}") as server:
        url = f"http://127.0.0.1:{server.port}"
        done = run("chat", "--url", url, "--max-tokens", "1000000", text="hello")
        assert done.returncode == 0, done.stderr
        assert "[422: " in done.stdout
        done = run("chat", "--url", url, "--max-tokens", "4", text="hello\n")
        assert done.returncode == 0, done.stderr
        assert "[" not in done.stdout.split("> ")[1]


def test_a_chat_whose_reader_leaves_ends_without_a_word() -> None:
    with scripted_server() as script:
        argv = [sys.executable, "-m", "tgi_trio", "chat", "--url", script.url]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(argv, **pipes) as process:  # type: ignore[call-overload]
            process.stdin.write(b"hello\n")
            process.stdin.flush()
            script.asked()
            process.stdout.close()
            script.say(content="Yes.")
            assert process.wait(120) == 128 + signal.SIGPIPE
            assert process.stderr.read() == b""
        script.end()


@pytest.mark.parametrize(
    ("encoding", "said", "sent", "shown"),
    [
        ("utf-8", b"a\xff", "a\ufffd", "caf\u00e9"),
        ("ascii", b"\xc3\xa9", "\ufffd\ufffd", "caf?"),
    ],
)
def test_what_the_encoding_lacks_is_replaced(
    encoding: str, said: bytes, sent: str, shown: str
) -> None:
    with scripted_server() as script:
        script.say(content="caf\u00e9")
        script.end()
        argv = [sys.executable, "-m", "tgi_trio", "chat", "--url", script.url]
        env = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
        done = subprocess.run(
            argv, input=said, stdout=subprocess.PIPE, env=env, timeout=120, check=True
        )
        assert script.asked()["messages"][-1]["content"] == sent
    assert done.stdout.decode(encoding).split("> ")[1] == f"{shown}\n"


TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]


def test_a_chat_folds_thoughts_and_asks_for_results(tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    said = "The weather?\n21 degrees\n/thoughts\n/think on\nWhy?\n/think maybe\nBye\n"
    with scripted_server() as script:
        script.say(reasoning_content="I look ", reasoning="I look ")
        script.say(reasoning_content="it up.", reasoning="it up.")
        script.call(0, id="call_a", name="get_weather", arguments='{"city":')
        script.call(0, arguments='"Rome"}')
        script.end()
        script.say(reasoning="It is warm.")
        script.say(content="21 ")
        script.say(content="degrees.")
        script.end()
        script.say(reasoning_content="The sun.")
        script.say(content="It shines.")
        script.end()
        script.events.put({"error": {"message": "broken"}})
        script.end()
        files = ("--tools", str(tmp_path / "tools.json"))
        done = run("chat", "--url", script.url, *files, text=said)
        assert done.returncode == 0, done.stderr
        asked = [script.asked() for _ in range(4)]
    _, call, result, shown, _, why, maybe, bye, _ = done.stdout.split("> ")
    assert call == '[thinks; /thoughts shows it]\n\nget_weather {"city":"Rome"}\nresult'
    assert result == "[thinks; /thoughts shows it]\n21 degrees.\n"
    assert shown == "It is warm.\n"
    assert why == "The sun.\nIt shines.\n"
    assert maybe.startswith("/reset")
    assert bye == "[broken]\n"
    assert all(body["tools"] == TOOLS for body in asked)
    assert ["chat_template_kwargs" in body for body in asked] == [False, False, True, True]
    assert asked[2]["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    first, called, found, answered, _ = asked[2]["messages"]
    assert first == {"role": "user", "content": "The weather?"}
    assert called["reasoning_content"] == "I look it up."
    (call,) = called["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city":"Rome"}'}
    assert found == {"role": "tool", "tool_call_id": "call_a", "content": "21 degrees"}
    assert answered["content"] == "21 degrees."


@pytest.mark.parametrize(
    ("flags", "env", "dim"),
    [((), {}, True), (("--no-color",), {}, False), ((), {"NO_COLOR": "1"}, False)],
)
def test_thoughts_are_dim_on_a_terminal(
    flags: tuple[str, ...], env: dict[str, str], dim: bool
) -> None:
    ours, theirs = os.openpty()
    with scripted_server() as script:
        script.say(reasoning="Hm.")
        script.say(content="Yes.")
        script.end()
        argv = [sys.executable, "-m", "tgi_trio", "chat", "--url", script.url, *flags]
        environ = {**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, **env}
        subprocess.run(
            argv, input=b"/thoughts\nSo?\n", stdout=theirs, env=environ, timeout=120, check=True
        )
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # the end of a terminal that everybody has left
        while piece := os.read(ours, 4096):
            text += piece
    os.close(ours)
    assert (b"\x1b[2mHm.\x1b[22m" in text) == dim
    assert (b"\x1b" in text) == dim
    assert b"Yes." in text


@pytest.mark.parametrize(
    ("text", "complaint"), [("{", "is no JSON: "), ("{}", "must hold a JSON list of tools")]
)
def test_bad_tools_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "tools.json").write_text(text)
    done = run("chat", "--tools", str(tmp_path / "tools.json"))
    assert (done.returncode, done.stdout) == (1, "")
    assert complaint in done.stderr


def test_a_server_that_is_not_there() -> None:
    done = run("chat", "--url", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (1, "")
    why = "http://127.0.0.1:9: Connection refused"
    assert done.stderr == f"tgi-trio: the server cannot be reached: {why}\n"
    done = run("chat", "--model-id", "/no/such/folder")
    assert done.returncode == 1
    assert "the server ended before it was ready:\ntgi-trio: " in done.stderr


def test_bench_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    small = ["--clients", "2", "--rate", "50", "--requests", "4", "--max-tokens", "8"]
    with serving(fake="{}") as server:
        done = run("bench", "--url", f"127.0.0.1:{server.port}", *small, "--json", str(out))
        failed = run("bench", "--url", f"127.0.0.1:{server.port}", *small[:-1], "1000000")
    assert failed.returncode == 1 and "failed: HTTPFailure" in failed.stdout  # nothing measured
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines()[2:4]] == [
        "closed 2",
        "open 50",
    ]
    document = json.loads(out.read_text())
    assert [result["completed"] for result in document["results"]] == [4, 4]
    assert [result["output_tokens"] for result in document["results"]] == [32, 32]


def test_bench_writes_to_a_file_or_not_at_all() -> None:
    done = run("bench", "--json", "/no/such/x")
    assert (done.returncode, done.stdout) == (1, "")
    complaint = "--json /no/such/x cannot be written: No such file or directory"
    assert done.stderr == f"tgi-trio: {complaint}\n"


def test_ctrl_c_breaks_off_an_answer_and_then_the_chat() -> None:
    answer = [500] * 400  # "umumum...": however much of it is seen, nothing looks like a prompt
    with serving(fake=json.dumps({"step_ms": 50, "replies": [answer]})) as server:
        argv = [sys.executable, "-u", "-m", "tgi_trio", "chat"]
        argv += ["--url", f"127.0.0.1:{server.port}", "--max-tokens", "400"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"hello\n")
            process.stdin.flush()
            seen = b""
            while b"> " not in seen or not seen.split(b"> ")[1]:
                seen += read(process.stdout)
            process.send_signal(signal.SIGINT)
            while seen.count(b"> ") < 2:  # the next prompt: the answer was broken off
                seen += read(process.stdout)
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0


def read(output: IO[bytes]) -> bytes:
    """Return what comes next, which is not the end."""
    found = os.read(output.fileno(), 4096)
    assert found
    return found
