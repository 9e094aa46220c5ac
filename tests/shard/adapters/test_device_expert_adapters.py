"""Adapters of experts over a stand-in device say what they say on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.shard.adapters.peft_support import install, write_adapter
from tests.shard.torch_backend.device_kinds import SMALL
from tests.shard.torch_backend.interpreter import need_triton

need_triton()

from tests.shard.adapters.test_device_adapters import (  # noqa: E402  (Triton's)
    TEXTS,
    few_programs,
    install_all,
    on_cpu,
)
from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402
from tests.shard.torch_backend.stand_in_support import (  # noqa: E402
    REQUEST,
    agree,
    drive,
    start,
)
from tgi_trio.errors import ModelLoadError  # noqa: E402
from tgi_trio.ipc.adapters import AdapterOrder  # noqa: E402
from tgi_trio.shard.torch_backend.adapters.device_adapters import DeviceAdapters  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.tiny_families import GEMMA4_MOE  # noqa: E402

__all__ = ["few_programs"]  # a fixture of all tests here, too
ADAPTERS = (1, 0, 2, 1, 2)
ASKED: list[dict[str, Any]] = [{"adapter": number} for number in ADAPTERS]
NONE: list[dict[str, Any]] = [{} for _ in ADAPTERS]
SERVED: dict[str, Any] = {"max_lora_rank": 16, "max_loaded_adapters": 3}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
Checkpoint = Callable[..., Path]

# Gates and ups as two matrices with an expert that all tokens use beside them, in turns in one
# matrix, with weights for inputs, and beside an MLP.
FAMILIES: dict[str, list[str]] = {
    "qwen2_moe": ["q_proj", "shared_expert.up_proj", "shared_expert_gate"],
    "gpt_oss": ["q_proj"],
    "llama4_text": ["shared_expert.down_proj"],
    "gemma4_text": ["q_proj"],
}
SIZES: dict[str, dict[str, Any]] = {"llama4_text": {}, "gemma4_text": GEMMA4_MOE}


def write_two(base: Path, folder: Path, modules: list[str]) -> list[Path]:
    own: dict[str, Any] = {"target_modules": modules, "target_parameters": EXPERTS}
    return [write_adapter(base, folder / str(r), seed=r, r=r, **own) for r in (16, 3)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "graphs"),
    [("qwen2_moe", (5,)), ("gpt_oss", ()), ("llama4_text", ()), ("gemma4_text", (5,))],
)
def test_a_batch_of_any_adapters_and_none(
    checkpoint: Checkpoint, tmp_path: Path, family: str, graphs: tuple[int, ...]
) -> None:
    base = checkpoint(family, **SIZES.get(family, SMALL))
    folders = write_two(base, tmp_path, FAMILIES[family])
    expected = on_cpu(base, folders, ASKED, **SERVED)
    without = on_cpu(base, folders, NONE, **SERVED)
    assert expected.tokens != without.tokens
    with StandInDevice() as device:
        runner = start(base, "cuda:0", graphs, **SERVED)
        install_all(runner, folders)
        ours = drive(runner, TEXTS, ASKED, 3, device=device)
        agree(ours, expected)
        plain = drive(runner, TEXTS, NONE, 3, device=device)
        assert not any("shrink_members" in counts.launches for counts in plain.decodes)
    agree(plain, without)


def test_quantised_experts_in_recorded_prefills(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What is added comes behind the product with codes; prompts come in chunks beside decodes."""
    base = checkpoint("qwen2_moe", **SMALL)
    folders = write_two(base, tmp_path, FAMILIES["qwen2_moe"])
    settings: dict[str, Any] = {**SERVED, "quantize": "int4"}
    expected = on_cpu(base, folders, ASKED, 20, **settings)
    with StandInDevice() as device:
        request = replace(REQUEST, max_prefill_tokens=20)
        runner = start(base, "cuda:0", (5,), request=request, **settings)
        assert device.counts.launches["multiply_coded_groups"]
        install_all(runner, folders)
        ours = drive(runner, TEXTS, ASKED, 3, device=device, budget=20)
    agree(ours, expected)
    assert all(counts.replays == 1 and not counts.launches for counts in ours.prefills)


def test_two_ranks_with_batch_invariance(checkpoint: Checkpoint, tmp_path: Path) -> None:
    base = checkpoint("qwen2_moe", **SMALL)
    folders = write_two(base, tmp_path, FAMILIES["qwen2_moe"])
    expected = on_cpu(base, folders, ASKED, **SERVED)
    settings = SERVED | {"batch_invariant": True}
    with StandInDevice() as device, two_ranks(base, device, (5,), **settings) as (runner, _):
        install_all(runner, folders)
        agree(drive(runner, TEXTS, ASKED, 3, device=device), expected)


def test_slots_have_no_room_for_what_no_adapter_changes(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    base = checkpoint("qwen2_moe", **SMALL)
    own: dict[str, Any] = {"target_modules": ["q_proj"]}
    plain = write_adapter(base, tmp_path / "plain", r=4, **own)
    more = [
        (write_adapter(base, tmp_path / "dora", r=4, use_dora=True, **own), "magnitudes"),
        (write_adapter(base, tmp_path / "head", r=4, target_modules=["lm_head"]), "the head"),
        (write_two(base, tmp_path, ["q_proj"])[1], "experts"),
    ]
    with StandInDevice():
        whole = start(base, "cuda:0", **SERVED)
        runner = start(base, "cuda:0", **SERVED, adapter_scope=())
        install(runner, 1, plain)
        hosts = [each.adapters for each in (whole, runner)]
        assert isinstance(hosts[0], DeviceAdapters) and isinstance(hosts[1], DeviceAdapters)
        assert hosts[1].nbytes < 0.5 * hosts[0].nbytes
        for folder, named in more:
            with pytest.raises(ModelLoadError, match=rf"changes .*{named}.*--lora-adapters"):
                hosts[1].load(AdapterOrder(2, folder))
