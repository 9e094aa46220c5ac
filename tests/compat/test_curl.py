"""The `curl` command."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.compat.conftest import KEY
from tests.system.client import decode
from tests.system.server import ServerProcess

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

JSON = ("-H", "content-type: application/json")
SHORT = {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}


def curl(*words: str, body: Any = None, stdin: bytes | None = None) -> str:
    """Run curl and return what it printed; it gives up by itself after two minutes."""
    data = () if body is None else ("-d", body if isinstance(body, str) else json.dumps(body))
    found = subprocess.run(
        ["curl", "-sS", "--max-time", "120", *words, *data], input=stdin, capture_output=True
    )
    assert found.returncode == 0, found.stderr.decode()
    return found.stdout.decode()


def events(text: str) -> list[dict[str, Any]]:
    return [event for line in text.splitlines() if (event := decode(line)) is not None]


def test_a_stream_prints_one_event_per_token(served: ServerProcess) -> None:
    found = events(curl("-N", f"{served.url}/generate_stream", *JSON, body=SHORT))
    assert [event["index"] for event in found] == [1, 2, 3]
    text = "".join(event["token"]["text"] for event in found)
    assert found[-1]["generated_text"] == text


def test_a_chat_stream_ends_with_done(served: ServerProcess) -> None:
    asked = [{"role": "user", "content": "Hello"}]
    body = {"messages": asked, "stream": True, "max_tokens": 3, "temperature": 0}
    text = curl("-N", f"{served.url}/v1/chat/completions", *JSON, body=body)
    assert text.endswith("data: [DONE]\n\n")
    assert len(events(text)) == 3


def test_events_arrive_at_once_and_a_curl_that_is_killed_leaves_nothing(
    guarded: ServerProcess,
) -> None:
    cancelled = 'tgi_request_cancelled{phase="decode"}'
    before = guarded.metric(cancelled)
    endless = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
    asks = ["curl", "-sSN", f"{guarded.url}/v1/completions", "-H", f"authorization: Bearer {KEY}"]
    process = subprocess.Popen(
        [*asks, *JSON, "-d", json.dumps(endless)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        first = decode(process.stdout.readline())
        assert first is not None and first["choices"][0]["finish_reason"] is None
    finally:
        process.kill()
        process.communicate()
    guarded.wait_idle()
    assert guarded.metric(cancelled) == before + 1  # so it was still running


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_http_1_0(served: ServerProcess, route: str) -> None:
    text = curl("-0", "-i", f"{served.url}{route}", *JSON, body=SHORT)
    head, _, body = text.replace("\r\n", "\n").partition("\n\n")
    assert " 200 " in head.splitlines()[0]
    assert "transfer-encoding" not in head.lower()  # HTTP/1.0 has no chunks
    assert "connection: close" in head.lower()
    content = events(body)[-1] if route == "/generate_stream" else json.loads(body)
    assert content["generated_text"]


def test_http_2_without_tls(served: ServerProcess) -> None:
    words = ("--http2-prior-knowledge", "-w", "\n%{http_version}")
    found = curl(*words, f"{served.url}/generate", *JSON, body=SHORT)
    body, _, version = found.rpartition("\n")
    assert version == "2" and json.loads(body)["generated_text"]


def test_expect_100_continue(served: ServerProcess) -> None:
    words = ("-i", "--expect100-timeout", "100", "-H", "Expect: 100-continue")
    text = curl(*words, f"{served.url}/generate", *JSON, body=SHORT)
    statuses = [line.split()[1] for line in text.splitlines() if line.startswith("HTTP/")]
    assert statuses == ["100", "200"]


def test_a_body_in_chunks(served: ServerProcess) -> None:
    words = ("-H", "transfer-encoding: chunked", "--data-binary", "@-")
    text = curl(*words, f"{served.url}/generate", *JSON, stdin=json.dumps(SHORT).encode())
    assert json.loads(text)["generated_text"]


MALFORMED = [
    ("{", "400", "Failed to parse the request body as JSON: "),
    ("", "400", "Failed to parse the request body as JSON: "),
    ('{"inputs": "a"', "400", "Failed to parse the request body as JSON: "),
    ("[]", "422", "Failed to deserialize the JSON body into the target type: "),
    ('{"inputs": 1}', "422", "inputs: Expected `str | array`"),
]


@pytest.mark.parametrize(("body", "status", "text"), MALFORMED)
@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_malformed_json(
    served: ServerProcess, route: str, body: str, status: str, text: str
) -> None:
    found = curl("-w", "\n%{http_code}", f"{served.url}{route}", *JSON, body=body)
    message, _, code = found.rpartition("\n")
    assert code == status and text in message


def test_statuses_of_what_is_not_a_request_for_text(served: ServerProcess, tmp_path: Path) -> None:
    code = ("-o", str(tmp_path / "body"), "-w", "%{http_code}")
    large = tmp_path / "large"
    large.write_bytes(b"a" * 2_000_001)
    assert curl(*code, f"{served.url}/generate", body="{}") == "415"  # a form
    assert curl(*code, f"{served.url}/generate") == "405"
    assert curl(*code, f"{served.url}/nowhere") == "404"
    assert curl(*code, f"{served.url}/generate", *JSON, "--data-binary", f"@{large}") == "413"
    assert curl(*code, "-I", f"{served.url}/health") == "200"
    assert curl(*code, "-X", "OPTIONS", f"{served.url}/generate") == "200"


def test_one_connection_serves_body_stream_and_error(served: ServerProcess) -> None:
    connects = ("-w", "\n%{num_connects}\n")
    text = curl(
        *(*connects, f"{served.url}/generate", *JSON, "-d", json.dumps(SHORT), "--next", "-sS"),
        *(*connects, f"{served.url}/generate_stream", *JSON, "-d", json.dumps(SHORT), "--next"),
        *("-sS", *connects, f"{served.url}/generate", *JSON, "-d", "{", "--next", "-sS"),
        *(*connects, f"{served.url}/info"),
    )
    counts = [line for line in text.splitlines() if line in ("0", "1")]
    assert counts == ["1", "0", "0", "0"]
