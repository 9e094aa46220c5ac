"""How many tokens a KV cache gets beside what else comes into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tgi_trio import demo
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import ShardInfo, WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.adapters.room import count_numbers, largest_adapter
from tgi_trio.shard.machine.kv_sizing import CacheSize, size_cache

DATA = Path(__file__).parents[2] / "conversion" / "data"
OUTER = ("embed", "wpe")  # parts of names of what is no linear; of GPT-2, wte is the head as well
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
BLOCK = INFO.block_size
MIB = 1 << 20


def size(
    request: WarmupRequest,
    free: int,
    activation: int = 0,
    *,
    info: ShardInfo = INFO,
    host: bool = False,
    **more: Any,
) -> CacheSize:
    return size_cache(request, info, lambda: free, activation, host=host, **more)


def tokens_of(*args: Any, **more: Any) -> int:
    return (size(*args, **more).blocks - 1) * BLOCK


def test_room_is_left_for_adapters_that_may_be_loaded_later() -> None:
    """As much as they may take, and none where all are there."""
    free, large = 10_240_000, 1_024_000

    def tokens(to_come: int, wanted: int = 0, adapter: int = large) -> int:
        request = WarmupRequest(64, 1000, 4, wanted, to_come)
        return tokens_of(request, free, adapter=adapter)

    assert tokens(0) == tokens(5, adapter=0) == 4000
    assert tokens(6) == 3072
    assert tokens(8) == 1024
    for wanted in (0, 1000):
        with pytest.raises(ConfigurationError, match=r"MiB are kept for adapters .*--max-loaded-a"):
            tokens(9, wanted)


def test_room_is_left_for_the_larger_of_a_step_and_an_image() -> None:
    """A tower computes between two steps."""
    request = WarmupRequest(64, 1000, 9, 0, tower_bytes=4_000_000)
    for activation, tokens in ((0, 4992), (3_000_000, 4992), (5_000_000, 4000)):
        assert tokens_of(request, 10_000_000, activation) == tokens


@pytest.mark.parametrize("host", [True, False])
def test_a_model_without_attention_keeps_tokens_for_nothing(host: bool) -> None:
    """What bounds it is its states: beside them there is room for all that may run."""
    alone = replace(INFO, kv_bytes_per_token=0, layers=0, state_bytes=10_000)
    request = WarmupRequest(64, 1000, 4, 0)
    assert size(request, 10_000_000, info=alone, host=host).state_slots == 1 + 2 * 4 + 8
    assert tokens_of(request, 10_000_000, info=alone, host=host) == 4 * 1000


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_largest_adapter_has_all_linears(model: str) -> None:
    """Counted by hand: a matrix for A and one for B at every linear, and two numbers by output.

    Heads are linears, whether they are tied to embeddings or not; a rank is one embedding more,
    and a number for every token and every feature of A and B of the embedding, whose features
    have a factor each, too.
    """
    spec = decoder_spec(read_config(DATA / model / "base"))
    assert spec is not None
    whole = load_file(DATA / model / "base" / "model.safetensors")
    for rank in (1, 7):
        counted = sum(
            rank * sum(matrix.shape) + 2 * matrix.shape[model == "gpt2" and "wte" not in name]
            for name, matrix in whole.items()
            if matrix.ndim == 2 and not any(part in name for part in OUTER)
        )
        counted += rank * spec.hidden_size + rank * (spec.vocab_size + spec.hidden_size)
        counted += spec.hidden_size
        assert count_numbers(spec, rank) == counted


def test_bytes_of_an_adapter_follow_the_dtype() -> None:
    settings = ShardSettings(model_path=demo.model_path(), max_lora_rank=8)
    config = read_config(settings.model_path)
    narrow = largest_adapter(settings, config, "bfloat16")
    assert largest_adapter(settings, config, "float32") == 2 * narrow > 0


def test_states_get_half_of_what_is_left_at_most_and_no_more_than_can_run() -> None:
    info = replace(INFO, state_bytes=1000)
    request = WarmupRequest(64, 1000, 4, 0)
    assert size(request, 10**9).state_slots == 0
    assert size(request, 10**9, info=info).state_slots == 1 + 2 * 4 + 8
    few = replace(request, max_total_tokens=8)
    assert size(few, 40_000, info=replace(info, state_bytes=2000)).state_slots == 9  # of 36 kB
    large = replace(info, state_bytes=64_000)
    states = size(request, 3_000_000, info=large).state_slots * large.state_bytes
    assert states == 17 * 64_000
    assert tokens_of(request, 3_000_000, info=large) == (2_700_000 - states) // 16_000 * 16
    with pytest.raises(ConfigurationError, match="states of one sequence would need 3 slots"):
        size(request, 5_000, info=info)


# --- a shard that follows another ------------------------------------------------------------


class Memory:
    """Bytes that are free at one look after the other; the last of them from then on."""

    def __init__(self, *free: int) -> None:
        self._free: Iterator[int] = iter(free[:-1])
        self._last = free[-1]
        self.slept = 0.0

    def measure(self) -> int:
        return next(self._free, self._last)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def size(self, request: WarmupRequest, activation: int = 0, **more: Any) -> CacheSize:
        info = more.pop("info", INFO)
        return size_cache(
            request, info, self.measure, activation, host=False, sleep=self.sleep, **more
        )


@given(
    free=st.integers(5_000, 150_000),  # MiB
    lost=st.integers(0, 400),  # in a hundredth of a percent of it
    each=st.integers(1, 1 << 20),
    state=st.sampled_from([0, 1, 3 * MIB]),
    wanted=st.sampled_from([0, 1, 1000]),
    host=st.booleans(),
    beside=st.integers(0, 1000),
)
def test_whoever_follows_has_what_the_first_one_found(
    free: int, lost: int, each: int, state: int, wanted: int, host: bool, beside: int
) -> None:
    """Though a few percent of what was free have gone, and the largest step takes a little more."""
    info = replace(INFO, kv_bytes_per_token=each, state_bytes=state)
    request = WarmupRequest(64, 1000, 16, wanted)
    more: dict[str, Any] = {"info": info, "host": host, "beside": beside}
    first = size(request, free * MIB, 100 * MIB, **more)
    again = replace(request, blocks=first.blocks, state_slots=first.state_slots)
    left = free * MIB - free * MIB * lost // 10_000
    found = size(again, left, 110 * MIB, **more, sleep=lambda _: pytest.fail("it waited"))
    assert (found.blocks, found.state_slots) == (first.blocks, first.state_slots)
    taken = found.blocks * BLOCK * (each + beside) + found.state_slots * state
    assert taken + 110 * MIB < left
    assert first.blocks * BLOCK * (each + beside) <= first.spare + BLOCK * (each + beside)


def test_an_8b_model_s_successor_has_the_blocks_that_the_first_one_rounded_to() -> None:
    """As an H200 said it: 113618 MiB, and the very same again."""
    info = replace(INFO, kv_bytes_per_token=131072)
    free = int(113_618.9 * MIB / 0.9)
    first = size(WarmupRequest(64, 8192, 128, 0), free, info=info)
    assert first.blocks - 1 == 908_951 // BLOCK
    again = WarmupRequest(64, 8192, 128, 0, blocks=first.blocks)
    assert Memory(free).size(again, info=info).blocks == first.blocks
    # A router that has rounded up asks for a block more than the first shard's share holds.
    again = replace(again, blocks=first.blocks + 1)
    assert Memory(free).size(again, info=info).blocks == first.blocks + 1


def test_memory_that_comes_back_late_is_waited_for() -> None:
    request = WarmupRequest(64, 1000, 4, 0, blocks=251)  # 4.016 MB
    memory = Memory(1_000_000, 1_000_000, 4_100_000, 4_300_000)
    assert memory.size(request).blocks == 251
    assert 0 < memory.slept < 1


def test_memory_that_does_not_come_back_is_waited_for_no_longer_than_seconds() -> None:
    request = WarmupRequest(64, 1000, 4, 0, blocks=251, adapters_to_come=1)
    memory = Memory(4_000_000)
    with pytest.raises(ConfigurationError) as refused:
        memory.size(request, adapter=MIB)
    assert 5 <= memory.slept <= 20
    told = str(refused.value)
    assert told.startswith("The KV cache had 4000 tokens when the server started")
    assert "lower --max-batch-total-tokens" in told and "1 MiB are kept for adapters" in told


def test_whoever_is_first_does_not_wait() -> None:
    memory = Memory(1_000_000, 10_000_000)
    with pytest.raises(
        ConfigurationError, match=r"would need 1008 tokens .* hold 896; lower --max-t"
    ):
        memory.size(WarmupRequest(64, 1000, 4, 0))
    with pytest.raises(ConfigurationError, match=r"would need 20000 tokens .* lower --max-batch-t"):
        memory.size(WarmupRequest(64, 1000, 4, 20_000))
    assert not memory.slept
