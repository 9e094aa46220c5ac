"""EXL3 checkpoints over the stand-in device: as stored, recorded, and in the tokens of the CPU."""

from __future__ import annotations

import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.adapters.peft_support import install, write_adapter
from tests.shard.cpu_backend.test_exl3 import SIZES, WIDE
from tests.shard.cpu_backend.test_exl3 import store as store_mixed
from tests.shard.torch_backend.device_kinds import SMALL
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import BLOCK, plan, prompts, sequences
from tests.support.exl3 import EXL3, store_exl3
from tests.support.quantised import Array, Tensors, quantise
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

need_triton()

from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402  (Triton's)
from tests.shard.torch_backend.stand_in_support import agree, drive, start  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears import trellis_linear  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.trellis_linear import TrellisLinear  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.stand_in_driver import Counts  # noqa: E402

TEXTS = prompts(2, longest=BLOCK + 4)
ASKED: list[dict[str, Any]] = [{}, {}]
ENDINGS = ("_proj.weight", "lm_head.weight")
EVERY = (*ENDINGS, ".w1.weight", ".w2.weight", ".w3.weight")  # of experts as well
Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an interpreter, which has but one, not do the work of hundreds."""
    for module in (split_kv, trellis_linear):
        monkeypatch.setattr(module, "_PROGRAMS", 4)


def store_apart(module: str, weight: Array) -> tuple[Tensors, Array]:
    """Every matrix scales its inputs in a way of its own: for tests that ask for no numbers."""
    tensors, exact = store_exl3(3)(module, weight)
    draw = np.random.default_rng(zlib.crc32(module.encode()))
    scales = tensors[f"{module}.suh"].float().numpy()
    own = (scales * draw.uniform(0.8, 1.2, scales.shape)).astype(np.float16)
    return tensors | {f"{module}.suh": torch.from_numpy(own)}, exact


def check(folder: Path, **own: Any) -> tuple[TorchRunner, Counter[str]]:
    """The tokens are the CPU's, and each decode is one replay; `own`: the device's settings.

    Return the runner and what the warm-up has launched.
    """
    expected = drive(start(folder, "cpu"), TEXTS, ASKED, 3, late=0)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (2,), **own)
        launches = Counter(device.counts.launches)
        ours = drive(runner, TEXTS, ASKED, 3, device=device, late=0)
    agree(ours, expected)
    assert ours.decodes and all(counts.replays == 1 for counts in ours.decodes)
    assert isinstance(runner, TorchRunner)
    return runner, launches


def make(checkpoint: Checkpoint, folder: Path, store: Any, family: str = "llama") -> Path:
    source = checkpoint(family, **SMALL | SIZES | WIDE)
    return quantise(source, folder / "q", store, EXL3, endings=ENDINGS)


def test_a_model_of_several_widths_and_codebooks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Queries, keys and values of three, gates and ups of two, the output and the head alike."""
    runner, launches = check(make(checkpoint, tmp_path, store_mixed))
    assert isinstance(runner.model, Decoder)
    linears = list(runner.model.linears())
    assert len(linears) == 5 and all(isinstance(linear, TrellisLinear) for linear in linears)
    assert launches["multiply_turned_few"] and launches["multiply_turned"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["gemma2", "starcoder2"])
def test_other_families(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Norms behind branches; biases, and no gates."""
    endings = ("_proj.weight", "c_fc.weight")
    source = checkpoint(family, **SMALL | SIZES | WIDE)
    folder = quantise(source, tmp_path / "q", store_exl3(2.5, "mul1"), EXL3, endings=endings)
    _, launches = check(folder)
    assert launches["multiply_turned_few"]


def test_a_head_of_its_own_where_the_model_has_a_tied_one(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The embedding is plain, and looked up; the head is multiplied as it is stored."""
    source = shutil.copytree(
        checkpoint("llama", **SMALL | SIZES | WIDE, tie_word_embeddings=True), tmp_path / "source"
    )
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    runner, _ = check(quantise(source, tmp_path / "q", store_exl3(6), EXL3, endings=ENDINGS))
    assert isinstance(runner.model, Decoder) and isinstance(runner.model.head, TrellisLinear)


def test_two_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Keys and values of a rank are half of what is turned together: plain numbers."""
    folder = make(checkpoint, tmp_path, store_mixed)
    expected = drive(start(folder, "cpu"), TEXTS, ASKED, 3)
    with StandInDevice() as device, two_ranks(folder, device, (2,)) as pair:
        runner, steps = pair
        launches = Counter(device.counts.launches)
        ours = drive(runner, TEXTS, ASKED, 3, device=device)
    agree(ours, expected)
    assert launches["multiply_turned_few"] and launches["multiply_turned"]
    assert ours.decodes and all(counts.replays == 1 for counts in ours.decodes)
    assert not any(counts.waits for counts in steps)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("rows", "dtype", "most"),
    [
        (1, "float32", 9),  # four products, and what is between them
        (2, "bfloat16", 9),
        (5, "bfloat16", 9 + 3),  # inputs are turned once for all matrices, and gates with them
        (70, "bfloat16", 9 + 3),  # in tiles
        (70, "float32", 9 + 3),
    ],
)
def test_launches_of_a_layer(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    dtype: str,
    most: int,
) -> None:
    """Whose matrices have one width."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 1)
    launched = count_launches(checkpoint, tmp_path, rows, dtype, store_apart)
    assert launched.total() == most, launched


@pytest.mark.parametrize(("alike", "most"), [(False, 4 + 4 + 5), (True, 4 + 4 + 4)])
def test_launches_of_many_rows(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alike: bool,
    most: int,
) -> None:
    """Inputs are turned, and gates opened, where matrices are written for a library, which
    multiplies gates and ups at once, and keys and values: they are equally many. `alike`: queries
    are as many.
    """
    monkeypatch.setattr(split_kv, "_PROGRAMS", 1)
    monkeypatch.setattr(trellis_linear, "MOST_ROWS", 64)
    own: dict[str, Any] = {"num_key_value_heads": 4} if alike else {}
    launched = count_launches(checkpoint, tmp_path, 70, "bfloat16", store_apart, **own)
    assert launched.total() == most, launched
    assert launched["turn_and_write"] == 4 and not launched["turn_inputs"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rows", "most"), [(2, 10), (5, 12)])
def test_launches_of_a_layer_of_experts(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    most: int,
) -> None:
    """A router's, and three of experts: what these find is turned by those who find it."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 1)
    own: dict[str, Any] = {"family": "mixtral", "intermediate_size": 64}
    launched = count_launches(checkpoint, tmp_path, rows, "bfloat16", store_apart, **own)
    assert launched.total() == most, launched


def count_launches(
    checkpoint: Checkpoint,
    folder: Path,
    rows: int,
    dtype: str,
    store: Any,
    family: str = "llama",
    **sizes: Any,
) -> Counter[str]:
    """Return what one layer launches, in a step of `rows` tokens of a sequence."""
    launched = []
    for layers in (1, 2):
        source = checkpoint(family, **SIZES | WIDE | sizes, num_hidden_layers=layers)
        made = quantise(source, folder / str(layers), store, EXL3, endings=EVERY)
        with StandInDevice() as device:
            told = ShardSettings(model_path=made, dtype=dtype)
            runner = load_torch_runner(
                told, read_config(told.model_path), device="cuda:0", graph_sizes=()
            )
            with device.idle():
                runner.warm_up(WarmupRequest(96, 128, 4, 63 * BLOCK))
            (row,) = sequences([list(range(3, 83))], new=4)
            row.computed, device.counts = row.length - rows, Counts()
            with device.idle():
                runner.launch(plan([row], [rows])).result()
            launched.append(Counter(device.counts.launches))
    return launched[1] - launched[0]


def test_adapters_beside_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What they add belongs to results that have been turned back."""
    folder = make(checkpoint, tmp_path, store_exl3(4, "mcg"))
    adapter = write_adapter(folder / "plain", tmp_path / "adapter", r=8)
    asked: list[dict[str, Any]] = [{"adapter": 1}, {"adapter": 0}]
    settings: dict[str, Any] = {"max_lora_rank": 8, "max_loaded_adapters": 1}
    said = []
    on_cpu = start(folder, "cpu", **settings)
    install(on_cpu, 1, adapter)
    for own in (asked, ASKED):
        said.append(drive(on_cpu, TEXTS, own, 3))
    assert said[0].tokens != said[1].tokens
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (2,), **settings)
        install(runner, 1, adapter)
        for own, expected in zip((asked, ASKED), said, strict=True):
            agree(drive(runner, TEXTS, own, 3, device=device), expected)


def test_batch_invariance(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """No program turns inputs by itself, and nothing is written for a library."""
    _, launches = check(make(checkpoint, tmp_path, store_mixed), batch_invariant=True)
    assert launches["multiply_turned"] and not launches["multiply_turned_few"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [64, 128])
def test_experts_stay_as_they_are_stored(
    checkpoint: Checkpoint, tmp_path: Path, width: int
) -> None:
    """And are multiplied together, so that steps can be recorded, whatever their width."""
    sizes = SMALL | SIZES | {"intermediate_size": width}
    folder = quantise(
        checkpoint("mixtral", **sizes),
        tmp_path / "q",
        store_exl3(4, "mcg"),
        EXL3,
        endings=EVERY,
    )
    _, launches = check(folder)
    assert launches["multiply_turned_groups"] and not launches["multiply_groups"]
