"""What decodes images for tests is forked, where nothing that is read early is another."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.warm_images import PROGRAM, ForkedProcess
from tgi_trio.router import sandbox_pool
from tgi_trio.router.media.decoder import DecoderSettings
from tgi_trio.router.sandbox_pool import Sandbox

pytestmark = pytest.mark.trio


@pytest.mark.parametrize(("variables", "forked"), [({}, True), ({"HF_HOME": "/other"}, False)])
async def test_decoders_are_forked(
    variables: dict[str, str], forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = [DecoderSettings("qwen2_vl").dump(), "4", "20", "1000000000", "0"]
    asked = Sandbox("images", [sys.executable, "-m", PROGRAM, *words], 1, results=True)
    process, results = await sandbox_pool._spawn(asked)
    assert isinstance(process, ForkedProcess) == forked
    assert results is not None and process.stdin and process.stdout and process.stderr
    try:
        said = b""
        while not said.endswith(b"\n"):
            said += await process.stdout.receive_some()
        assert said == b'{"value": null}\n'
        assert process.poll() is None
        await process.stdin.aclose()
        assert await process.wait() == 0
    finally:
        process.kill()
        os.close(results)
        for stream in (process.stdin, process.stdout, process.stderr):
            await stream.aclose()
