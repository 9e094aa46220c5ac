"""Adapters of experts say what transformers with PEFT says, in torch and in the CPU kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.adapters.peft_support import PeftGolden, adapted, check, install, write_adapter
from tests.shard.cpu_backend.kernel_support import HYBRIDS, MIXTURES, UNEQUAL, cpu_runner
from tests.shard.cpu_backend.test_digits import AMX
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    load,
    prompts,
    run,
    sequences,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.adapters.files import read_adapter
from tgi_trio.model.adapters.needs import find_needs
from tgi_trio.model.adapters.sites import EVERYTHING, map_adapter
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.testing.tiny_families import GEMMA4_MOE

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 5
PROMPTS = prompts(6)
Checkpoint = Callable[..., Path]

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "v_proj"]
# Stored a matrix for each expert under two names, [out, in] or [in, out], gates and ups in turns;
# chosen by groups, behind latents, with weights for inputs, beside an expert that all tokens use,
# or beside an MLP.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"target_modules": ATTENTION},
    "qwen3_moe": {"target_modules": ATTENTION},
    "qwen2_moe": {"target_modules": "all-linear"},
    "gpt_oss": {"target_modules": ATTENTION},
    "deepseek_v3": {"target_modules": []},
    "llama4_text": {"target_modules": ["shared_expert.down_proj"]},
    "granitemoe": {"target_modules": ATTENTION},
    "lfm2_moe": {"target_modules": []},
    "gemma4_text": {"target_modules": ["q_proj"]},
}
IN_TORCH = {"gemma4_text": GEMMA4_MOE}
IN_KERNELS = MIXTURES | HYBRIDS
IN_KERNELS["gemma4_text"] = UNEQUAL["gemma4_text"] | GEMMA4_MOE


def write_two(base: Path, folder: Path, family: str) -> list[Path]:
    """Return adapters of two ranks, of all experts."""
    own = FAMILIES[family] | {"target_parameters": EXPERTS}
    return [write_adapter(base, folder / str(r), seed=r, r=r, **own) for r in (4, 3)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_torch(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Rows of two adapters and of none, in chunks, joining as others decode."""
    base = checkpoint(family, **IN_TORCH.get(family, {}))
    folders = write_two(base, tmp_path, family)
    golden = PeftGolden(base, folders)
    runner, recorder = load(base, max_lora_rank=4)
    for number, folder in enumerate(folders, start=1):
        install(runner, number, folder)
    rows = adapted(sequences(PROMPTS, new=NEW), [1, 0, 2, 1, 2, 0])
    run(runner, rows, chunk=9, joins=2)
    for row in rows:
        check(golden, recorder, row)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "lfm2_moe", "gemma4_text"]
)
def test_every_family_in_the_cpu_kernels(
    checkpoint: Checkpoint, tmp_path: Path, family: str
) -> None:
    """The same on two threads; without adapters, to the bit what it was."""
    base = checkpoint(family, **IN_KERNELS[family])
    folders = write_two(base, tmp_path, family)
    golden = PeftGolden(base, folders)
    with cpu_runner(base, max_lora_rank=4, cores=(0, 0)) as (runner, recorder):
        plain = sequences(PROMPTS, new=NEW)
        run(runner, plain)
        alone = [recorder.logits(row.id) for row in plain]
        for number, folder in enumerate(folders, start=1):
            install(runner, number, folder)
        rows = adapted(sequences(PROMPTS, new=NEW), [1, 0, 2, 1, 2, 0])
        run(runner, rows, chunk=9, joins=2)
        for row in rows:
            check(golden, recorder, row)
        again = sequences(PROMPTS, new=NEW)
        run(runner, again)
        assert all(torch.equal(recorder.logits(i), found) for i, found in enumerate(alone))


def write_by_expert(base: Path, folder: Path, place: str, names: tuple[str, str, str]) -> Path:
    """Write an adapter of linears of each expert, as PEFT did before transformers 5."""
    config = json.loads((base / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    count = config.get("num_experts") or config["num_local_experts"]
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(layers):
        for expert in range(count):
            for name in names:
                sizes = (width, hidden) if name == names[2] else (hidden, width)
                path = f"base_model.model.model.layers.{layer}.{place}.{expert}.{name}"
                for part, shape in (("A", (2, sizes[0])), ("B", (sizes[1], 2))):
                    noise = torch.randn(shape, generator=generator) * 0.5 / shape[1] ** 0.5
                    tensors[f"{path}.lora_{part}.weight"] = noise
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": list(names)}
    values |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("family", "place", "names"),
    [
        ("qwen3_moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    ],
)
def test_linears_of_each_expert(
    checkpoint: Checkpoint, tmp_path: Path, family: str, place: str, names: tuple[str, str, str]
) -> None:
    base = checkpoint(family)
    folder = write_by_expert(base, tmp_path / "a", place, names)
    golden = PeftGolden(base, [folder])
    runner, recorder = load(base, max_lora_rank=2)
    install(runner, 1, folder)
    rows = adapted(sequences(PROMPTS[:3], new=NEW), [1, 0, 1])
    run(runner, rows, chunk=9)
    for row in rows:
        check(golden, recorder, row)


def turn(folder: Path, target: Path, experts: int, **config: Any) -> Path:
    """Write an adapter of experts as PEFT before 0.19 did, which took [out, in] for [in, out]."""
    tensors = load_file(folder / "adapter_model.safetensors")
    turned = dict(tensors)
    for name, a in tensors.items():
        if ".experts." in name and "lora_A" in name:
            other = name.replace("lora_A", "lora_B")
            b = tensors[other]
            by_rank = a.view(experts, -1, a.shape[1]).permute(2, 1, 0)  # [in, r, experts]
            turned[other] = by_rank.reshape(a.shape[1], -1).contiguous()
            by_expert = b.view(b.shape[0], -1, experts).permute(2, 1, 0)  # [experts, r, out]
            turned[name] = by_expert.reshape(-1, b.shape[0]).contiguous()
    target.mkdir()
    save_file(turned, target / "adapter_model.safetensors")
    values = json.loads((folder / "adapter_config.json").read_text()) | config
    (target / "adapter_config.json").write_text(json.dumps(values))
    return target


@pytest.mark.parametrize("square", [False, True])
def test_what_earlier_releases_wrote(checkpoint: Checkpoint, tmp_path: Path, square: bool) -> None:
    """Shapes tell which way round a pair is, and where matrices are square, the release does."""
    base = checkpoint("olmoe", **({"intermediate_size": 32} if square else {}))
    own: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
    folder = write_adapter(base, tmp_path / "a", **own)
    old = turn(folder, tmp_path / "old", 4, peft_version="0.18.1")
    runner, recorder = load(base, max_lora_rank=4)
    install(runner, 1, folder)
    install(runner, 2, old)
    rows = adapted(sequences([PROMPTS[2]] * 2, new=4), [1, 2])
    run(runner, rows)
    golden = PeftGolden(base, [folder])
    check(golden, recorder, rows[0])
    torch.testing.assert_close(recorder.logits(1), recorder.logits(0), atol=1e-5, rtol=0.0)
    unsaid = turn(folder, tmp_path / "unsaid", 4, peft_version=None)
    if square:
        with pytest.raises(ModelLoadError, match="peft_version"):
            install(runner, 3, unsaid)
    else:
        install(runner, 3, unsaid)


@pytest.mark.parametrize("quantize", ["eetq", pytest.param("eetq by rows", marks=AMX), "q8_0"])
def test_quantised_experts(checkpoint: Checkpoint, tmp_path: Path, quantize: str) -> None:
    """What torch computes with rounded weights and the same adapter, but for routers' rounding."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64}
    base = checkpoint("qwen2_moe", **sizes, shared_expert_intermediate_size=64)
    modules = ["q_proj", "shared_expert.down_proj"]
    own: dict[str, Any] = {"target_modules": modules, "target_parameters": EXPERTS}
    folder = write_adapter(base, tmp_path / "a", **own)
    int8, by_rows = quantize == "eetq", quantize.endswith(" by rows")
    quantize = quantize.removesuffix(" by rows")
    reference, recorder = load(base, quantize=quantize, max_lora_rank=4)
    install(reference, 1, folder)
    run(reference, adapted(sequences([PROMPTS[5]] * 3, new=1), [0, 1, 1]))
    wanted = [recorder.logits(i) for i in range(3)]
    kept: dict[str, Any] = {"int8": True} if int8 else {"quantize": quantize}
    with cpu_runner(base, int8_by_rows=by_rows, max_lora_rank=4, **kept) as (runner, recorder):
        install(runner, 1, folder)
        run(runner, adapted(sequences([PROMPTS[5]] * 3, new=1), [0, 1, 1]))
        found = [recorder.logits(i) for i in range(3)]
    assert not torch.allclose(wanted[0], wanted[1], atol=0.5)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.1, rtol=0.0)


def test_others_adapters_change_no_bit(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The same batch, other rows' adapters exchanged: the same logits to the bit."""
    base = checkpoint("qwen3_moe", **MIXTURES["qwen3_moe"])
    own: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
    folders = [write_adapter(base, tmp_path / str(r), seed=r, r=r, **own) for r in (4, 7)]
    with cpu_runner(base, max_lora_rank=8, cores=(0, 0)) as (runner, recorder):
        for number, folder in enumerate(folders, start=1):
            install(runner, number, folder)
        found = []
        for others in ([1, 1, 1], [2, 0, 1], [0, 0, 0]):
            rows = adapted(sequences(PROMPTS[:4], new=NEW), [1, *others])
            run(runner, rows, chunk=16, joins=4)
            found.append(recorder.logits(rows[0].id))
            recorder.by_place.clear()
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


def test_two_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Experts' matrices divided as the model's are: what one process says."""
    base = checkpoint("qwen2_moe")
    own = FAMILIES["qwen2_moe"] | {"target_parameters": EXPERTS}
    folders = [write_adapter(base, tmp_path / str(r), seed=r, r=r, **own) for r in (4, 3)]
    golden, recorder = PeftGolden(base, folders), GreedyRecorder()
    with ranks_of(base, 2, recorder, max_lora_rank=4) as runner:
        runner.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
        for each in runner.runners:
            for number, folder in enumerate(folders, start=1):
                install(each, number, folder)
        rows = adapted(sequences(PROMPTS[:4], new=NEW), [1, 0, 2, 1])
        run(runner, rows, chunk=9, joins=2)
    for row in rows:
        check(golden, recorder, row)


def test_patterns_name_parameters(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Ranks and alphas of one of both parameters, and one that is adapted alone."""
    base = checkpoint("qwen3_moe")
    own: dict[str, Any] = {"target_modules": [], "target_parameters": EXPERTS}
    patterns = {
        "rank_pattern": {"experts.down_proj": 2},
        "alpha_pattern": {r"layers\.1\.mlp\.experts\.gate_up_proj": 3},
        "use_rslora": True,
    }
    for name, config in (
        ("both", own | patterns),
        ("down", own | {"target_parameters": EXPERTS[1:]}),
        ("inner", own | {"target_parameters": EXPERTS[:1]}),
    ):
        folder = write_adapter(base, tmp_path / name, **config)
        runner, recorder = load(base, max_lora_rank=4)
        install(runner, 1, folder)
        rows = adapted(sequences(PROMPTS[:2], new=4), [1, 0])
        run(runner, rows)
        golden = PeftGolden(base, [folder])
        for row in rows:
            check(golden, recorder, row)


def change(folder: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """Write an adapter with other tensors of the first layer's experts; None takes one away."""
    place = "base_model.model.model.layers.0.mlp.experts."
    whole: dict[str, torch.Tensor | None] = {**load_file(folder / "adapter_model.safetensors")}
    whole |= {place + name.replace("__", "."): each for name, each in tensors.items()}
    target.mkdir()
    left = {name: each for name, each in whole.items() if each is not None}
    save_file(left, target / "adapter_model.safetensors")
    values = json.loads((folder / "adapter_config.json").read_text())
    values |= {"use_dora": any("magnitude" in name for name in tensors)}
    (target / "adapter_config.json").write_text(json.dumps(values))
    return target


def test_what_is_refused_of_experts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Each with what is wrong; four experts of 64 and 48 features, rank 4."""
    base = checkpoint("qwen3_moe")
    own: dict[str, Any] = {"target_modules": [], "target_parameters": EXPERTS}
    folder = write_adapter(base, tmp_path / "a", **own)
    one = "0__gate_proj__lora_"
    pair = {f"{one}A__weight": torch.zeros(4, 64), f"{one}B__weight": torch.zeros(48, 4)}
    twice = {"base_layer__lora_A__weight": torch.zeros(16, 48)}
    twice["base_layer__lora_B__weight"] = torch.zeros(64, 16)
    away: dict[str, None] = {"lora_A__weight": None, "lora_B__weight": None}
    gates: dict[str, None] = {f"base_layer__{name}": None for name in away}
    magnitude = {f"{one[:-1]}_magnitude_vector": torch.ones(48)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"lora_A__weight": None}, r"holds no lora_A of .*mlp\.experts, only lora_B"),
        ({"lora_B__weight": torch.zeros(64, 8)}, "do not fit each other"),
        ({"lora_B__weight": torch.zeros(66, 16)}, r"experts map 64 to 96 numbers and 48 to 64"),
        (twice, "two changes of the same matrices"),
        (
            {"lora_A__weight": torch.zeros(8, 48), "lora_B__weight": torch.zeros(64, 8)},
            "4 experts of the rank 4 have 16 rows",
        ),
        (pair, r"experts\.0\.gate_proj and of all experts together"),
        ({"lora_magnitude_vector": torch.ones(64)} | away, "holds no lora_A"),
        ({"lora_magnitude_vector": torch.ones(64)}, "of experts, only A and B are served"),
    ]
    spec = decoder_spec(read_config(base))
    assert spec is not None
    for i, (tensors, said) in enumerate(cases):
        with pytest.raises(ModelLoadError, match=said):
            map_adapter(read_adapter(change(folder, tmp_path / str(i), **tensors)), spec)
    # those of one expert alone, with magnitudes
    alone = change(folder, tmp_path / "one", **pair, **magnitude, **away, **gates)
    tensors = load_file(alone / "adapter_model.safetensors")
    save_file(
        {name: each for name, each in tensors.items() if "experts.0" in name},
        alone / "adapter_model.safetensors",
    )
    with pytest.raises(ModelLoadError, match=r"DoRA or biases of .*gate_proj: of experts, only A"):
        map_adapter(read_adapter(alone), spec)
    with pytest.raises(ModelLoadError, match="has the rank 4; at most 3"):
        map_adapter(read_adapter(folder), spec, 3)
    assert "Merge it with PEFT" in read_adapter(folder).config.advise()


def test_room_for_what_named_adapters_need(checkpoint: Checkpoint, tmp_path: Path) -> None:
    base = checkpoint("qwen3_moe")
    spec = decoder_spec(read_config(base))
    assert spec is not None
    attention: dict[str, Any] = {"target_modules": ATTENTION, "r": 2}
    plain = write_adapter(base, tmp_path / "plain", **attention)
    dora = write_adapter(base, tmp_path / "dora", use_dora=True, **attention)
    experts = write_adapter(base, tmp_path / "e", r=7, target_modules=[], target_parameters=EXPERTS)
    for folders, grows, rank, words in (
        ([plain], False, 2, ()),
        ([plain, dora], False, 2, ("gains",)),
        ([plain, experts], False, 7, ("experts",)),
        ([plain], True, 64, EVERYTHING.words()[1:]),
        ([experts], True, 64, EVERYTHING.words()),
    ):
        needs = find_needs(folders, spec, 64, grows=grows)
        assert (needs.rank, needs.scope.words()) == (rank, words)
