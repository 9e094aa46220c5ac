"""How many tokens a KV cache gets beside what else comes into memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tgi_trio import demo
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import ShardInfo, WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.adapters.room import count_numbers, largest_adapter
from tgi_trio.shard.machine.kv_sizing import kv_tokens, state_slots

DATA = Path(__file__).parents[2] / "conversion" / "data"
OUTER = ("embed", "wte", "wpe", "head")  # parts of names of what is no layer's
INFO = ShardInfo(
    vocab_size=1,
    block_size=16,
    layers=1,
    kv_bytes_per_token=1000,
    max_positions=1000,
    eos_ids=(),
    dtype="float32",
    device="cpu",
    backend="none",
    load_ns=0,
)


def test_room_is_left_for_adapters_that_may_be_loaded_later() -> None:
    """As much as they may take, and none where all are there."""
    free, large = 10_000_000, 1_000_000

    def tokens(to_come: int, wanted: int = 0, adapter: int = large) -> int:
        request = WarmupRequest(64, 1000, 4, wanted, to_come)
        return kv_tokens(request, INFO, free, 0, host=False, adapter=adapter)[0]

    assert tokens(0) == tokens(5, adapter=0) == 4000
    assert tokens(6) == 3000
    assert tokens(8) == 1000
    for wanted in (0, 1000):
        with pytest.raises(ConfigurationError, match=r"MiB are kept for adapters .*--max-loaded-a"):
            tokens(9, wanted)


def test_room_is_left_for_the_larger_of_a_step_and_an_image() -> None:
    """A tower computes between two steps."""
    request = WarmupRequest(64, 1000, 9, 0, tower_bytes=4_000_000)
    for activation, tokens in ((0, 5000), (3_000_000, 5000), (5_000_000, 4000)):
        assert kv_tokens(request, INFO, 10_000_000, activation, host=False)[0] == tokens


@pytest.mark.parametrize("host", [True, False])
def test_a_model_without_attention_keeps_tokens_for_nothing(host: bool) -> None:
    """What bounds it is its states: beside them there is room for all that may run."""
    alone = replace(INFO, kv_bytes_per_token=0, layers=0, state_bytes=10_000)
    request = WarmupRequest(64, 1000, 4, 0)
    slots = state_slots(request, alone, 10_000_000, 0)
    assert slots == 1 + 2 * 4 + 8
    states = slots * alone.state_bytes
    tokens, _ = kv_tokens(request, alone, 10_000_000, 0, host=host, states=states)
    assert tokens == 4 * 1000


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_largest_adapter_has_all_linears(model: str) -> None:
    """Counted by hand: a matrix for A and one for B at every linear."""
    spec = decoder_spec(read_config(DATA / model / "base"))
    assert spec is not None
    whole = load_file(DATA / model / "base" / "model.safetensors")
    for rank in (1, 7):
        counted = sum(
            rank * sum(matrix.shape)
            for name, matrix in whole.items()
            if matrix.ndim == 2 and not any(part in name for part in OUTER)
        )
        assert count_numbers(spec, rank) == counted


def test_bytes_of_an_adapter_follow_the_dtype() -> None:
    settings = ShardSettings(model_path=demo.model_path(), max_lora_rank=8)
    assert largest_adapter(settings, "float32") == 2 * largest_adapter(settings, "bfloat16") > 0


def test_states_get_half_of_what_is_left_at_most_and_no_more_than_can_run() -> None:
    info = replace(INFO, state_bytes=1000)
    request = WarmupRequest(64, 1000, 4, 0)
    assert state_slots(request, INFO, 10**9, 0) == 0
    assert state_slots(request, info, 10**9, 0) == 1 + 2 * 4 + 8
    assert state_slots(request, info, 20_000, 0) == 9  # of 18 kB that may be used
    free = 3_000_000
    with_states = kv_tokens(request, info, free, 0, host=False, states=1_000_000)[0]
    assert with_states == kv_tokens(request, info, free, 0, host=False)[0] - 1000
    with pytest.raises(ConfigurationError, match="states of one sequence would need 3 slots"):
        state_slots(request, info, 5_000, 0)
