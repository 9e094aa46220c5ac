"""TLS, several addresses and several keys, by flags."""

from __future__ import annotations

import signal
import ssl
import time
from pathlib import Path

import httpx
import pytest

from tests.system.client import TIMEOUT, get, post
from tests.system.server import serving
from tests.system.test_bad_input import start
from tgi_trio.testing.ports import reserve_port

pytestmark = pytest.mark.system

CERTIFICATE = str(Path(__file__).parents[1] / "router" / "http" / "wire" / "data" / "localhost.pem")
QUERY = {"inputs": "x", "parameters": {"max_new_tokens": 2}}


def asks(client: httpx.Client, key: str) -> int:
    """Return the status of an answer to who has this key."""
    headers = {"authorization": f"Bearer {key}"}
    return client.post("/generate", json=QUERY, headers=headers).status_code


def test_every_address_serves_every_key(tmp_path: Path) -> None:
    path, keys = tmp_path / "server.sock", tmp_path / "keys"
    keys.write_text("three\nfour\n")
    flags = ["--ssl-certfile", CERTIFICATE, "--ssl-keyfile", CERTIFICATE, "--bind", f"unix:{path}"]
    flags += ["--api-key", "one", "--api-key", "two", "--api-key-file", str(keys)]
    with (
        reserve_port() as secure,
        serving(*flags, "--bind", f"127.0.0.1:{secure}", ready=False, fake="{}") as server,
    ):
        context = ssl.create_default_context(cafile=CERTIFICATE)
        context.check_hostname = False
        tls = httpx.Client(base_url=f"https://127.0.0.1:{secure}", verify=context, timeout=TIMEOUT)
        unix = httpx.Client(
            base_url="http://server", transport=httpx.HTTPTransport(uds=str(path)), timeout=TIMEOUT
        )
        server.url = f"https://127.0.0.1:{secure}"
        server.wait_ready(verify=context)
        with tls, unix:
            for client in (tls, unix):
                for key in ("one", "two", "three", "four"):
                    assert asks(client, key) == 200
                assert client.post("/generate", json=QUERY).status_code == 401
            keys.write_text("five\n")
            while asks(tls, "five") == 401:
                time.sleep(0.05)
            assert [asks(tls, key) for key in ("five", "three", "one")] == [200, 401, 200]
        with pytest.raises(httpx.ConnectError):  # not at --port, where addresses are named
            get(f"http://127.0.0.1:{server.port}/health")
        assert f"at unix:{path} and https://127.0.0.1:{secure}" in server.output
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not path.exists()


def test_metrics_have_a_port_of_their_own_and_a_missing_collector_holds_nothing_up() -> None:
    collector = ("--otlp-endpoint", "http://127.0.0.1:1")
    with (
        reserve_port() as port,
        serving("--prometheus-port", str(port), *collector, fake="{}") as server,
    ):
        watched = f"http://127.0.0.1:{port}"
        for _ in range(20):
            assert post(f"{server.url}/generate", json=QUERY).status_code == 200
        for path in ("/health", "/live", "/ready"):
            assert get(f"{watched}{path}").status_code == 200
        assert "tgi_request_success 20\n" in get(f"{watched}/metrics").text
        assert post(f"{watched}/generate", json=QUERY).status_code == 404
        assert "trace_id=" in server.output
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ssl-certfile", "/nowhere.pem"], "--ssl-certfile"),
        (["--ssl-keyfile", CERTIFICATE], "--ssl-keyfile needs --ssl-certfile"),
        (["--bind", "unix:/nowhere/at/all.sock"], "--bind"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere cannot be read"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(flags: list[str], words: str) -> None:
    result = start(*flags, "--model-id", "/no/such/folder")
    assert result.returncode == 1
    assert words in result.stderr and "Traceback" not in result.stderr
