"""What the router makes of the shard's facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.harness import engine_on_fake_shard
from tgi_trio.demo import model_path
from tgi_trio.errors import ConfigurationError
from tgi_trio.model.facts import read_model_facts
from tgi_trio.router.assembly import compute_type, load_chat_template
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.settings.records import Options
from tgi_trio.settings.resolve import resolve
from tgi_trio.testing.fake_model import FakeSettings


@pytest.mark.trio
@pytest.mark.parametrize(
    ("device", "name", "ranks", "expected"),
    [
        ("cpu", "", 2, "cpu+optimized"),
        ("cuda:0", "NVIDIA A10G", 2, "2-nvidia-a10g"),  # TGI's own example
        ("cuda:0", "", 1, "cuda+optimized"),
    ],
)
async def test_the_compute_type_names_what_computes(
    device: str,
    name: str,
    ranks: int,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeSettings(vocab_size=259, device=device, device_name=name)
    async with engine_on_fake_shard(tmp_path, fake) as bench:
        info = bench.info
    monkeypatch.delenv("COMPUTE_TYPE", raising=False)
    assert compute_type(info, ranks) == expected
    monkeypatch.setenv("COMPUTE_TYPE", "mine")
    assert compute_type(info, ranks) == "mine"
    monkeypatch.setenv("COMPUTE_TYPE", "")  # counts as not set
    assert compute_type(info, ranks) == expected


def test_defaults_of_a_template_that_every_request_has_are_refused() -> None:
    tokenizer, facts = Tokenizer.from_folder(model_path()), read_model_facts(model_path())
    options = Options(default_chat_template_kwargs={"x": 1})
    assert load_chat_template(resolve(options, facts), tokenizer)
    options = Options(default_chat_template_kwargs={"tools": [], "messages": 1})
    with pytest.raises(ConfigurationError, match="cannot set messages, tools: every request"):
        load_chat_template(resolve(options, facts), tokenizer)
