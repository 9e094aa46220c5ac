"""Settings: defaults, the checks with TGI's texts, and what the warm-up changes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.model.facts import ModelFacts, read_model_facts
from tgi_trio.settings.checks import check
from tgi_trio.settings.records import Options
from tgi_trio.settings.resolve import resolve, with_kv
from tgi_trio.settings.shown import as_json, as_rows


def facts(**changes: Any) -> ModelFacts:
    return ModelFacts(
        **{"path": Path("/m"), "model_type": "llama", "max_positions": 2048, **changes}
    )


def test_defaults_are_tgis() -> None:
    settings = resolve(Options(), facts())
    shown = as_json(settings)
    assert {name: shown[name] for name in (
        "validation_workers", "max_concurrent_requests", "max_best_of", "max_stop_sequences",
        "max_top_n_tokens", "max_client_batch_size", "payload_limit", "waiting_served_ratio",
        "max_waiting_tokens", "hostname", "port", "graceful_termination_timeout", "num_shard",
    )} == {
        "validation_workers": 2, "max_concurrent_requests": 128, "max_best_of": 2,
        "max_stop_sequences": 4, "max_top_n_tokens": 5, "max_client_batch_size": 4,
        "payload_limit": 2_000_000, "waiting_served_ratio": 0.3, "max_waiting_tokens": 20,
        "hostname": "0.0.0.0", "port": 3000, "graceful_termination_timeout": 90.0, "num_shard": 1,
    }  # fmt: skip
    assert settings.max_total_tokens == 2048
    assert settings.max_input_tokens == 2047
    assert settings.max_batch_prefill_tokens == 2048  # 4096, capped by the model's positions
    assert settings.served_model_names == ("tgi-trio/demo",)


@pytest.mark.parametrize(
    ("positions", "tokenizer", "whole", "expected"),
    [
        (None, None, None, 4096),
        (None, 512, None, 512),
        (131072, None, None, 131072),
        (131072, 32768, None, 32768),
        (131072, None, 5000, 5000),
    ],
)
def test_default_of_max_total_tokens(
    positions: int | None, tokenizer: int | None, whole: int | None, expected: int
) -> None:
    settings = resolve(
        Options(max_batch_total_tokens=whole),
        facts(max_positions=positions, tokenizer_max_length=tokenizer),
    )
    assert (settings.max_total_tokens, settings.max_input_tokens) == (expected, expected - 1)


@pytest.mark.parametrize(
    ("given", "checkpoint", "expected"),
    [
        (None, "bfloat16", "bfloat16"),
        (None, "float16", "float32"),
        (None, None, "float32"),
        ("float16", "float32", "float16"),
    ],
)
def test_dtype(given: str | None, checkpoint: str | None, expected: str) -> None:
    assert resolve(Options(dtype=given), facts(dtype=checkpoint)).dtype == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_workers": 0}, "`validation_workers` must be > 0"),
        ({"max_batch_size": 0}, "`max_batch_size` must be > 0"),
        ({"port": 65536}, "`port` must be <= 65535. Given: 65536"),
        ({"spin_us": -1}, "`spin_us` must be >= 0. Given: -1"),
        ({"hostname": "localhost"}, "`hostname` must be an IP address"),
        ({"device": "cuda:1"}, "`device` must be auto, cpu, or what torch calls a kind of device"),
        ({"dtype": "int8"}, "`dtype` must be one of float32, bfloat16, float16. Given: int8"),
        ({"quantize": "int3"}, "`quantize` must be one of awq, compressed-tensors, eetq, exl2"),
        (
            {"kv_cache_dtype": "fp8"},
            "`kv_cache_dtype` must be one of fp8_e4m3fn, fp8_e5m2. Given: fp8",
        ),
        ({"activations": 4}, "`activations` must be 8 or 16. Given: 4"),
        ({"num_shard": 0}, "`num_shard` cannot be < 1"),
        ({"num_shard": 1, "sharded": True}, "`sharded` is true but `num_shard` <= 1"),
        ({"prefix_cache_bytes": 0}, "`prefix_cache_bytes` must be > 0. Given: 0"),
        (
            {"prefix_cache_path": Path("p"), "prefix_caching": False},
            "`prefix_cache_path` does not go with `prefix_caching` off",
        ),
        (
            {"prefix_cache_path": Path("p"), "remote_ranks": 1, "num_shard": 2},
            "`prefix_cache_path` does not go with ranks on other machines",
        ),
        (
            {"prefix_cache_host_bytes": -1},
            "`prefix_cache_host_bytes` must be >= 0. Given: -1",
        ),
        (
            {"prefix_cache_host_bytes": 1, "prefix_caching": False},
            "`prefix_cache_host_bytes` does not go with `prefix_caching` off: nothing is evicted",
        ),
        ({"pipeline_stages": 0}, "`pipeline_stages` must be > 0. Given: 0"),
        (
            {"pipeline_stages": 2},
            "must divide `num_shard`: each stage has as many ranks. Given: 2 of 1",
        ),
        ({"pipeline_stages": 2, "num_shard": 5}, "has as many ranks. Given: 2 of 5"),
        ({"pipeline_stages": 2, "num_shard": 2, "speculate": 2}, "does not go with drafts"),
        (
            {"pipeline_stages": 2, "num_shard": 2, "lora_adapters": ("a",)},
            "does not go with adapters",
        ),
        (
            {"adapter_tokenizers": "mine"},
            "`adapter_tokenizers` must be one of own, base. Given: mine",
        ),
        ({"remote_ranks": -1}, "`remote_ranks` must be >= 0. Given: -1"),
        ({"remote_ranks": 2, "num_shard": 2}, "rank 0 of several runs here. Given: 2 of 2"),
        ({"remote_ranks": 1, "num_shard": 2}, "`remote_ranks` needs `cluster_secret_file`"),
        ({"shard": ("tcp://a:1", "tcp://b:1"), "num_shard": 2}, "`shard` must be < `num_shard`"),
        ({"shard": ("tcp://a:1",)}, "`shard` needs `cluster_secret_file`"),
        (
            {"shard": ("tcp://a:1", "tcp://a:1"), "num_shard": 3},
            "`shard` names tcp://a:1 twice",
        ),
        ({"shard": ("tcp://a:1",), "remote_ranks": 1}, "`remote_ranks` does not go with `shard`"),
        (
            {"shard": ("tcp://a:1",), "rank_address": "0.0.0.0:1"},
            "`rank_address` does not go with `shard`",
        ),
        (
            {"shard": ("tcp://a:1",), "cluster_secret_file": Path("s"), "spin_us": 5},
            "`spin_us` does not go with `shard`: it is for readers of memory",
        ),
        (
            {"remote_ranks": 1, "cluster_secret_file": Path("s"), "image_memory": 5},
            "`image_memory` does not go with `remote_ranks`: pixels of images reach a shard",
        ),
        ({"rank_address": "unix:/r"}, "`rank_address` must be host:port or [host]:port. Given"),
        ({"sharded": True}, "`sharded` is true: say over how many ranks with `num_shard`"),
        (
            {"max_input_tokens": 100, "max_total_tokens": 100},
            "`max_input_tokens`(100) must be < `max_total_tokens`(100)",
        ),
        (
            {"max_input_tokens": 10, "max_input_length": 12},
            "`max_input_tokens` (10) and `max_input_length` (12) are both set: define only "
            "`max_input_tokens`",
        ),
        (
            {"max_input_length": 200, "max_batch_total_tokens": 100},
            "`max_input_length`(200) must be < `max_batch_total_tokens`(100)",
        ),
        ({"max_batch_total_tokens": 1}, "`max_batch_total_tokens` must be > 1, a token of a"),
        ({"max_total_tokens": 2049}, "`max_total_tokens` must be <= 2048"),
        (
            {"max_total_tokens": 200, "max_batch_total_tokens": 100},
            "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 200 and 100",
        ),
        (
            {"max_batch_prefill_tokens": 200, "max_batch_total_tokens": 100},
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: 200 and 100",
        ),
        (
            {"step_token_budget": 200, "max_batch_prefill_tokens": 100},
            "`step_token_budget` must be <= `max_batch_prefill_tokens`. Given: 200 and 100",
        ),
        (
            {"max_batch_size": 200, "step_token_budget": 100},
            "`max_batch_size` must be <= `step_token_budget`. Given: 200 and 100",
        ),
        (
            {"max_batch_size": 200, "max_batch_prefill_tokens": 100},
            "`max_batch_size` must be <= `max_batch_prefill_tokens`. Given: 200 and 100",
        ),
        (
            {"step_token_budget": 200, "max_batch_total_tokens": 100},
            "`step_token_budget` must be <= `max_batch_total_tokens`. Given: 200 and 100",
        ),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        resolve(Options(**options), facts())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"port": 81, "prometheus_port": 81},
            "`prometheus_port` asks for 0.0.0.0:81 and `port` for 0.0.0.0:81: choose another",
        ),
        (
            {"aip_http_port": 81, "prometheus_port": 81},
            "`prometheus_port` asks for 0.0.0.0:81 and `aip_http_port` for 0.0.0.0:81",
        ),
        (
            {"bind": ("127.0.0.1:81",), "prometheus_port": 81},
            "`prometheus_port` asks for 0.0.0.0:81 and `bind` for 127.0.0.1:81",
        ),
        (
            {"port": 81, "remote_ranks": 1, "rank_address": "127.0.0.1:81"},
            "`rank_address` asks for 127.0.0.1:81 and `port` for 0.0.0.0:81",
        ),
        ({"bind": ("unix:/a", "unix:/a")}, "`bind` names unix:/a and unix:/a: leave one"),
        ({"bind": ("[::]:81", "[::1]:81")}, "`bind` names [::]:81 and [::1]:81"),
        ({"bind": ("0.0.0.0:81", "[::]:81")}, ""),
        ({"bind": ("127.0.0.1:81", "127.0.0.2:81")}, ""),
        ({"bind": ("127.0.0.1:0", "127.0.0.1:0")}, ""),
        ({"bind": ("127.0.0.1:81", "[::1]:82"), "prometheus_port": 82}, ""),
        ({"port": 81, "rank_address": "127.0.0.1:81"}, ""),  # nobody listens there
    ],
)
def test_addresses_that_exclude_each_other_are_named(options: dict[str, Any], message: str) -> None:
    if not message:
        check(Options(**options))
        return
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        check(Options(**options))


def test_older_name_of_max_input_tokens() -> None:
    settings = resolve(Options(max_input_length=100), facts())
    assert settings.max_input_tokens == 100
    assert ("max_input_tokens", "100", "asked") in list(as_rows(settings))


def test_warm_up_shrinks_what_nobody_asked_for() -> None:
    settings = with_kv(resolve(Options(), facts()), blocks=10, block_size=16)
    assert settings.max_batch_total_tokens == settings.max_total_tokens == 160
    assert settings.max_input_tokens == 159
    assert settings.max_batch_prefill_tokens == settings.step_token_budget == 160
    assert (settings.kv_blocks, settings.kv_block_size) == (10, 16)


def test_warm_up_keeps_to_the_kv_tokens_asked_for() -> None:
    before = resolve(Options(max_batch_total_tokens=100), facts())
    assert with_kv(before, blocks=1000, block_size=16).max_batch_total_tokens == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_total_tokens": 2000}, "Not enough memory to handle `max_total_tokens=2000`"),
        (
            {"max_input_tokens": 1000},
            "`max_input_tokens` must be < `max_total_tokens`. Given: 1000",
        ),
        (
            {"max_batch_prefill_tokens": 1000},
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: 1000 and 160",
        ),
    ],
)
def test_what_was_asked_for_must_fit_the_kv_cache(options: dict[str, Any], message: str) -> None:
    before = resolve(Options(**options), facts())
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        with_kv(before, blocks=10, block_size=16)
    after = with_kv(before, blocks=1000, block_size=16)
    assert all(getattr(after, name) == value for name, value in options.items())


def test_a_cache_that_holds_nothing_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="Not enough memory"):
        with_kv(resolve(Options(), facts()), blocks=0, block_size=16)


maybe = st.none() | st.integers(1, 5000)


@hypothesis_settings(max_examples=300, deadline=None)
@given(
    options=st.builds(
        Options,
        max_concurrent_requests=st.integers(1, 1000),
        max_input_tokens=maybe,
        max_total_tokens=maybe,
        max_batch_prefill_tokens=maybe,
        max_batch_total_tokens=maybe,
        max_batch_size=maybe,
        step_token_budget=maybe,
    ),
    positions=maybe,
    blocks=st.integers(1, 400),
    block_size=st.sampled_from([1, 16]),
)
def test_limits_always_fit_together(
    options: Options, positions: int | None, blocks: int, block_size: int
) -> None:
    try:
        before = resolve(options, facts(max_positions=positions))
        after = with_kv(before, blocks, block_size)
    except ConfigurationError:
        # Limits that nobody chose never stand in the way, if there is room for two tokens.
        assert options != Options(max_concurrent_requests=options.max_concurrent_requests) or (
            (positions or 2) < 2 or blocks * block_size < 2
        )
        return
    for settings in (before, after):
        assert 0 < settings.max_input_tokens < settings.max_total_tokens
        assert settings.max_batch_size <= settings.step_token_budget
        assert settings.step_token_budget <= settings.max_batch_prefill_tokens
        assert settings.max_batch_size > 0
        for name in settings.explicit & {"max_input_tokens", "max_total_tokens"}:
            assert getattr(settings, name) == getattr(options, name)
    assert after.max_total_tokens <= after.max_batch_total_tokens <= blocks * block_size
    assert after.max_batch_prefill_tokens <= after.max_batch_total_tokens


def write(folder: Path, name: str, content: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def test_facts_of_a_gpt2_folder(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_positions": 1024, "vocab_size": 9, "torch_dtype": "float32"}
    write(tmp_path, "config.json", config | {"architectures": ["GPT2LMHeadModel"]})
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 1000})
    assert read_model_facts(tmp_path) == ModelFacts(
        path=tmp_path,
        model_type="gpt2",
        max_positions=1024,
        tokenizer_max_length=1000,
        vocab_size=9,
        dtype="float32",
    )


def test_facts_of_a_hub_snapshot_with_a_nested_text_config(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "abc123"
    text = {"max_position_embeddings": 77, "vocab_size": 5, "dtype": "torch.bfloat16"}
    write(folder, "config.json", {"model_type": "gemma3", "text_config": text})
    write(folder, "tokenizer_config.json", {"model_max_length": int(1e30)})
    found = read_model_facts(folder)
    assert (found.model_type, found.max_positions, found.vocab_size) == ("gemma3", 77, 5)
    assert (found.dtype, found.tokenizer_max_length) == ("bfloat16", None)
    assert found.revision_sha == "abc123"


@pytest.mark.parametrize(("content", "message"), [
    (None, "holds no config.json"),
    ("{", "cannot be read as JSON"),
    ("[]", "holds no JSON object"),
])  # fmt: skip
def test_unreadable_configs(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        read_model_facts(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"watermark_gamma": 0.0}, "`watermark_gamma` must be > 0 and < 1. Given: 0.0"),
        ({"watermark_gamma": 1.0}, "`watermark_gamma` must be > 0 and < 1. Given: 1.0"),
        ({"watermark_gamma": float("nan")}, "`watermark_gamma` must be > 0 and < 1"),
        ({"watermark_delta": float("inf")}, "`watermark_delta` must be >= -1e+06 and <= 1e+06"),
        ({"watermark_delta": float("nan")}, "`watermark_delta` must be >= -1e+06 and <= 1e+06"),
        ({"watermark_gamma": 0.0009}, "`watermark_gamma` 0.0009 of 1000 tokens is not one token"),
    ],
)
def test_watermarks_that_could_not_act(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        resolve(Options(**options), facts(vocab_size=1000))


def test_the_tokenizer_s_own_folder(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    write(model, "config.json", {"model_type": "llama", "max_position_embeddings": 90})
    write(model, "tokenizer_config.json", {"model_max_length": 50})
    write(other, "tokenizer_config.json", {"model_max_length": 70})
    own = resolve(Options(), read_model_facts(model))
    assert (own.tokenizer_path, own.max_total_tokens) == (model, 50)
    given = resolve(Options(tokenizer_name="x"), read_model_facts(model, other))
    assert (given.tokenizer_path, given.max_total_tokens) == (other, 70)
    assert (given.model_path, given.tokenizer_name) == (model, "x")
