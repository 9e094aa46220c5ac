"""Nothing is compiled while serving: what steps launch, the warm-up has launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.adapters.peft_support import install, write_adapter
from tests.shard.torch_backend.interpreter import launch_to_compile, need_triton
from tests.shard.torch_backend.models_support import BLOCK, plan, sequence, tables
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

need_triton()

from tests.shard.torch_backend.stand_in_support import FallingTimes  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402  (it imports Triton)

# Whose recordings, and steps with long contexts, choose what is attended to.
CHOOSING = ("minimax_m3_vl_text", "qwen4_exp_text")
ROWS = 6
ASKED: list[dict[str, Any]] = [{}, {"sample": True, "top_p": 0.9}, {"repetition_penalty": 1.3}]
Key = tuple[object, ...]


def compiled_for(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """Return what Triton compiles a kernel anew for, when it has not seen it before.

    Its constants and options, the types of what it is given, whether memory is aligned, and of
    whole numbers whether they are 1 or multiples of 16, but for those it is told not to look at.
    """
    loose = set(function.kwargs.get("do_not_specialize") or ())
    options = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
    found: list[object] = [function.fn.__name__, *sorted(options.items(), key=repr)]
    for name, argument in zip(function.arg_names, args, strict=False):
        if isinstance(argument, torch.Tensor):
            found.append((argument.dtype, argument.data_ptr() % 16 == 0))
        elif isinstance(argument, int) and name not in loose:
            found.append((type(argument), argument == 1, argument % 16 == 0))
        else:
            found.append(type(argument))
    return tuple(found)


@pytest.fixture
def device(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[StandInDevice]:
    checkpoint(request.node.callspec.params["family"])  # transformers makes it without one
    write_adapter(checkpoint("llama"), tmp_path / "adapter")
    from tgi_trio.shard.torch_backend import device_parts
    from tgi_trio.shard.torch_backend.adapters import device_adapters
    from tgi_trio.shard.torch_backend.attention.paged import (
        few_heads,
        spans,
        split_kv,
    )
    from tgi_trio.shard.torch_backend.layers.attention import expanding
    from tgi_trio.shard.torch_backend.layers.experts import grouped_experts
    from tgi_trio.shard.torch_backend.layers.linears import (
        coded_linear,
        few_rows,
        lone_shares,
        plain_product,
    )
    from tgi_trio.shard.torch_backend.models import beginning

    monkeypatch.setattr(device_parts, "RecordedTime", FallingTimes)
    for module in (few_rows, few_heads, lone_shares, beginning):
        monkeypatch.setattr(module, "agree", lambda *_: True)  # nothing is computed
    monkeypatch.setattr(few_rows, "_LEAST", 1)
    monkeypatch.setattr(grouped_experts, "FEW_TOKENS", 16)
    monkeypatch.setattr(coded_linear, "_PROGRAMS", 4)
    monkeypatch.setattr(device_adapters, "FEW_TOKENS", 16)
    launch_to_compile(monkeypatch)
    kinds = ((1, 8), (2, 4), (4, 2), (5, 8), (9, 4), (17, 2), (33, 1))  # of 8 programs
    monkeypatch.setattr(expanding, "_KINDS", kinds)
    monkeypatch.setattr(split_kv, "_PROGRAMS", 8)  # so that few rows are divided, and many are not
    monkeypatch.setattr(spans, "SPAN", 16)
    monkeypatch.setattr(spans, "_PROGRAMS", 32)
    monkeypatch.setattr(plain_product, "_LEAST_PART", 16)
    monkeypatch.setattr(plain_product, "_FEW_ROWS", 16)
    with StandInDevice() as stand_in, stand_in.idle():  # what is computed is of no interest
        yield stand_in


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("family", "graphs", "settings"),
    [
        ("llama", (1, 2), {"speculate": 2}),
        ("gemma2", (), {}),
        ("mixtral", (), {}),
        ("deepseek_v3", (), {}),
        ("deepseek_v4", (), {}),
        ("gemma4_text", (2,), {}),
        ("mimo_v2_flash", (), {}),
        ("llama4_text", (2,), {}),
        ("glm_moe_dsa", (), {}),
        ("glm_moe_dsa", (2,), {}),
        *((family, (1, 2), {}) for family in CHOOSING),
        ("llama", (2,), {"quantize": "int4"}),
        ("gemma2", (), {"quantize": "q8_0"}),
        ("llama", (2,), {"max_lora_rank": 16, "max_loaded_adapters": 2}),
        ("llama", (2,), {"batch_invariant": True}),
        ("llama", (2,), {"batch_invariant": True, "quantize": "int4", "max_lora_rank": 16}),
        ("deepseek_v3", (), {"batch_invariant": True}),
        ("bamba", (1, 2), {}),
        ("recurrent_gemma", (), {}),
        ("deepseek_v4", (), {"batch_invariant": True}),
        ("hunyuan_v1_dense", (2,), {}),
        ("falcon_h1", (1, 2), {}),
        ("gemma3n_text", (2,), {}),
        ("olmo2", (), {}),
    ],
)
def test_serving_compiles_nothing(
    checkpoint: Callable[..., Path],
    device: StandInDevice,
    family: str,
    graphs: tuple[int, ...],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[Key] = set()
    launch = device.launch_kernel

    def note(function: Any, *args: Any, **kwargs: Any) -> None:
        seen.add(compiled_for(function, args, kwargs))
        launch(function, *args, **kwargs)

    monkeypatch.setattr(device, "launch_kernel", note)
    told = ShardSettings(model_path=checkpoint(family), dtype="bfloat16", **settings)
    runner = load_torch_runner(
        told, read_config(told.model_path), device="cuda:0", graph_sizes=graphs
    )
    runner.warm_up(WarmupRequest(40, 64, ROWS, 31 * BLOCK))
    if runner.adapters is not None:
        install(runner, 1, tmp_path / "adapter")
    warm = set(seen)
    assert family != "llama" or graphs != (1, 2) or any(key[0] == "multiply_heads" for key in warm)
    for counts in (
        [1],
        [2],
        [40],
        [16],  # which Triton would specialise
        [1, 1],
        [1, 9],
        [9] * 4,
        [1, 1, 9, 9, 9],
        [5] * ROWS,
        [1] * ROWS,
    ):
        texts = [[7 + i] * (count if count > 1 else 5) for i, count in enumerate(counts)]
        blocks = tables(texts, shuffle=3, new=1)
        asked = [
            ASKED[i % len(ASKED)] | {"adapter": int(runner.adapters is not None)}
            for i in range(len(counts))
        ]
        rows = [sequence(i, t, blocks[i], 1, **asked[i]) for i, t in enumerate(texts)]
        for row, count in zip(rows, counts, strict=True):
            row.computed = row.length - count
        runner.launch(plan(rows, counts)).result()
        assert seen == warm, (counts, seen - warm)


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_what_may_be_chosen_for_few_rows_is_compiled_ahead(
    checkpoint: Callable[..., Path],
    device: StandInDevice,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    """Whatever the warm-up then measures: shares of matrices, heads, norms in products."""
    from tgi_trio.shard.torch_backend import device_parts, torch_runner

    seen: set[Key] = set()
    ahead: set[Key] = set()
    launch = device.launch_kernel

    def note(function: Any, *args: Any, **kwargs: Any) -> None:
        if function.fn.__name__ in ("multiply_few", "multiply_heads", "begin_rows"):
            seen.add(compiled_for(function, args, kwargs))
        launch(function, *args, **kwargs)

    class Times(FallingTimes):
        def __init__(self, _: object, capture: Any) -> None:
            super().__init__()
            self._capture = capture

        def __call__(self, work: Callable[[], object]) -> float:
            took = super().__call__(work)
            return 0.0 if self._capture._rehearses else took

    def rehearse(_: object, work: Callable[[], None]) -> int:
        work()
        ahead.update(seen)
        seen.clear()
        return 0

    monkeypatch.setattr(device, "launch_kernel", note)
    monkeypatch.setattr(device_parts, "RecordedTime", Times)
    monkeypatch.setattr(torch_runner, "compile_ahead", rehearse)
    told = ShardSettings(model_path=checkpoint(family), dtype="bfloat16")
    runner = load_torch_runner(
        told, read_config(told.model_path), device="cuda:0", graph_sizes=(1, 2)
    )
    runner.warm_up(WarmupRequest(40, 64, ROWS, 31 * BLOCK))
    assert len(seen) > 10 and seen <= ahead, seen - ahead
