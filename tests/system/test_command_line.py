"""The command as operators run it: keys, levels of the log, JSON alone, and the other commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm_start import run_warm
from tests.system.client import generate, get, post
from tests.system.server import serving
from tgi_trio import demo

pytestmark = pytest.mark.system

BODY = {"inputs": "Continuous batching is", "parameters": {"max_new_tokens": 2}}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return run_warm("-m", "tgi_trio", *words)


def records(output: str) -> list[dict[str, Any]]:
    """Return every line as the JSON object it must be."""
    return [json.loads(line) for line in output.splitlines()]


def status(url: str, key: str | None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return post(f"{url}/generate", json=BODY, headers=headers).status_code


def test_a_key_opens_whole_and_no_part_of_it_does(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("from a,file\nand another\n")
    file.chmod(0o600)
    env = {"API_KEY": "long, secret"}
    with serving("--api-key-file", str(file), fake="{}", env=env) as server:
        for key in ("long, secret", "LONG, SECRET", "from a,file", "and another"):
            assert status(server.url, key) == 200, key
        parts = ("long", "secret", " secret", "long,", "long,secret", "from a", "file", "another")
        for each in (*parts, None):
            assert status(server.url, each) == 401, each
        output = server.output
    assert "long" not in output and "from a" not in output


def test_every_line_is_json() -> None:
    env = {"API_KEY": "", "ATTENTION": "paged", "LOG_LEVEL": "info,hyper=debug"}
    with serving("--json-output", "--env", "--usage-stats=on", env=env) as server:
        assert status(server.url, None) == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        output = server.output
    messages = [record["message"] for record in records(output)]
    served = next(record for record in records(output) if record["message"].startswith("Serving "))
    assert served["addresses"] == [server.url]
    for beginning in (
        "settings", "memory in bytes", "start-up: ", "python: ", "API_KEY is empty",
        "LOG_LEVEL: nothing here answers to hyper=debug", "ATTENTION makes no difference here",
        "--usage-stats makes no difference here: nothing is ever sent",
    ):  # fmt: skip
        assert [m for m in messages if m.startswith(beginning)], beginning


def test_mistakes_are_json_too() -> None:
    for words, code in (
        (("--json-output", "--zzz"), 2),
        (("--json-output", "--tokenizer-config-path", "/nowhere.json"), 1),
        (("--json-output", "./nowhere"), 1),
        (("download-weights", "./nowhere", "--json-output"), 1),
    ):
        done = run(*words)
        assert done.returncode == code
        (record,) = records(done.stdout + done.stderr)
        assert record["level"] == "ERROR", record


UNCAUGHT = """
import sys
import warnings
from tgi_trio.log_levels import parse_log_levels
from tgi_trio.logs import set_up_logging

class Stubborn:
    def __del__(self):
        raise KeyError("ignored")

set_up_logging(json_output=True, levels=parse_log_levels("info"))
warnings.warn("beware")
print("a library", "prints", file=sys.stderr)
Stubborn()
raise ValueError("uncaught")
"""


def test_an_exception_that_nobody_catches_is_json() -> None:
    argv = [sys.executable, "-c", UNCAUGHT]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (1, "")
    warned, printed, ignored, uncaught = records(done.stderr)
    assert "beware" in warned["message"]
    assert printed["message"] == "a library prints"
    assert "KeyError: 'ignored'" in ignored["exception"]
    assert "ValueError: uncaught" in uncaught["exception"]


@pytest.mark.parametrize(
    ("level", "accessed", "warned"),
    [
        ("info,text_generation_router=debug", True, False),
        ("text_generation_router=warn", False, False),
        ("loud", True, True),
    ],
)
def test_levels_of_the_log(level: str, accessed: bool, warned: bool) -> None:
    with serving(fake="{}", env={"LOG_LEVEL": level}) as server:
        assert status(server.url, None) == 200
        server.signal(signal.SIGTERM)  # the client may have its answer before the line is written
        assert server.wait() == 0
        output = server.output
    assert "Traceback" not in output
    assert ("tgi_trio.access: " in output) is accessed
    assert ("logging at info" in output) is warned
    assert "Serving tgi-trio/demo at " in output


def test_a_tokenizer_config_that_is_nowhere_ends_the_start() -> None:
    done = run("--tokenizer-config-path", "/nowhere.json", "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("tgi-trio: --tokenizer-config-path /nowhere.json cannot be read")


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("gptq", ("--samples", "2", "--sample-tokens", "32")),
        pytest.param("gguf", ("--format", "gguf:q8_0"), marks=pytest.mark.thorough),
    ],
)
def test_quantize_writes_what_can_be_served(
    tmp_path: Path, kind: str, flags: tuple[str, ...]
) -> None:
    if kind == "gptq":
        text = tmp_path / "text"
        text.write_text("What is a KV cache? Keys and values of tokens that were computed. " * 20)
        flags += ("--calibration-text", str(text))
    out = tmp_path / f"model.{kind}"
    done = run("quantize", str(demo.model_path()), str(out), *flags, "--json-output")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == str(out)
    with serving("--model-id", str(out)) as server:
        assert generate(server.url, "What is a KV cache?", max_new_tokens=8)["generated_text"]
        assert get(f"{server.url}/info").json()["settings"]["quantize"] == kind


def test_the_schema_is_the_one_that_is_served_and_needs_no_torch() -> None:
    program = (
        "import sys; from tgi_trio.__main__ import main; code = main(['print-schema']); "
        "print(*sys.modules.keys() & {'torch', 'trio', 'transformers', 'quart'}, file=sys.stderr); "
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True
    )
    assert "torch" not in done.stderr and "transformers" not in done.stderr
    with serving(fake="{}") as server:
        assert get(f"{server.url}/api-doc/openapi.json").json() == json.loads(done.stdout)
