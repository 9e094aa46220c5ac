"""Settings that do nothing are named."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tgi_trio.model.facts import ModelFacts
from tgi_trio.settings.idle import find_idle, find_idle_limits
from tgi_trio.settings.records import Options
from tgi_trio.settings.resolve import resolve

MODEL = ModelFacts(path=Path("/m"), model_type="llama", max_positions=2048)


@pytest.mark.parametrize(
    ("idle", "work"),
    [
        ({"max_lora_rank": 8}, {"lora_adapters": ("a=/a",)}),
        ({"max_loaded_adapters": 8}, {"adapter_updates": True}),
        ({"adapter_tokenizers": "base"}, {"adapter_updates": True}),
        ({"rank_address": "0.0.0.0:1"}, {"remote_ranks": 1, "num_shard": 2}),
        ({"prefix_cache_bytes": 8}, {"prefix_cache_path": Path("/p")}),
        ({"prefix_cache_save_seconds": 8.0}, {"prefix_cache_path": Path("/p")}),
        ({"otlp_service_name": "x"}, {"otlp_endpoint": "http://a:1"}),
    ],
)
def test_what_has_no_work_is_named_until_it_has(idle: dict[str, Any], work: dict[str, Any]) -> None:
    (name,) = idle
    secret: dict[str, Any] = {"cluster_secret_file": Path("/s")}
    (said,) = find_idle(resolve(Options(**idle), MODEL))
    assert said.startswith(f"--{name.replace('_', '-')} has no effect: ")
    assert find_idle(resolve(Options(**idle, **work, **secret), MODEL)) == []


@pytest.mark.parametrize(
    ("idle", "other"),
    [
        ({"max_grammar_bytes": 8}, {"disable_grammar_support": True}),
        ({"max_grammar_seconds": 8.0}, {"disable_grammar_support": True}),
        ({"port": 80}, {"bind": ("unix:/s",)}),
        ({"port": 80}, {"aip_http_port": 81}),
        ({"aip_http_port": 80}, {"bind": ("unix:/s",)}),
        ({"hostname": "127.0.0.1"}, {"bind": ("unix:/s",)}),
    ],
)
def test_what_another_leaves_without_work_is_named(
    idle: dict[str, Any], other: dict[str, Any]
) -> None:
    assert find_idle(resolve(Options(**idle), MODEL)) == []
    assert find_idle(resolve(Options(**other), MODEL)) == []
    (said,) = find_idle(resolve(Options(**idle, **other), MODEL))
    assert "has no effect: --" in said


def test_an_adapter_that_is_merged_has_texts() -> None:
    asked = resolve(Options(adapter_tokenizers="base", max_lora_rank=8), MODEL)
    (said,) = find_idle(asked, merged=True)
    assert said.startswith("--max-lora-rank has no effect")


def test_an_address_that_metrics_are_at_has_work() -> None:
    asked = Options(hostname="127.0.0.1", bind=("unix:/s",), prometheus_port=9000)
    assert find_idle(resolve(asked, MODEL)) == []


@pytest.mark.parametrize(
    ("served", "named"),
    [
        ({"images", "videos", "audio parts"}, []),
        ({"images", "audio parts"}, ["--max-video-frames"]),
        ({"images"}, ["--max-video-frames", "--max-audio-seconds"]),
        ((), ["--max-image-pixels", "--max-video-frames", "--max-audio-seconds"]),
    ],
)
def test_limits_of_what_no_prompt_may_have_are_named(
    served: Collection[str], named: list[str]
) -> None:
    options = Options(max_image_pixels=9, max_video_frames=9, max_audio_seconds=9)
    said = find_idle_limits(resolve(options, MODEL), served)
    assert [line.split(" has no effect: no ")[0] for line in said] == named
    assert find_idle_limits(resolve(Options(), MODEL), ()) == []


def test_nothing_is_said_of_defaults() -> None:
    assert find_idle(resolve(Options(), MODEL)) == []
