"""The text of models that see images as well is what transformers writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.torch_backend.golden import Golden, assert_as_golden, assert_greedy
from tests.shard.torch_backend.models_support import TOLERANCES, load, prompts, run, sequences
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.model.adapters.config import AdapterConfig
from tgi_trio.model.adapters.files import Adapter, Pair
from tgi_trio.model.adapters.sites import Site, map_adapter
from tgi_trio.model.check import check_checkpoint, model_spec
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.checkpoint_tensors import read_tensors
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.cpu_kernels import find_unsupported
from tgi_trio.model.wrappers import DEFAULTS
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.cpu_backend.program import pack_program
from tgi_trio.shard.quantising.job import Job
from tgi_trio.shard.quantising.quantise import quantise_model
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 8
PROMPTS = prompts(8)[4:]
OURS = (
    *(
        "cohere_compass",
        "deepseek_ocr2",
        "fuyu",
        "gemma3",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "idefics2",
        "idefics3",
        "internvl",
        "llama4",
    ),
    *(
        "glm5_next",
        "glmga",
        "granite4_vision",
        "granite_docling",
        "llava",
        "llava_next",
        "gemma4",
        "minicpmv4_7",
        "minimax_m3_vl",
        "muse_glimmer",
        "mistral3",
        "mistral_large4",
        "mllama",
        "hunyuan_vl",
        "hyperclovax_vision_v2",
        "paddleocr_vl",
        "paligemma",
        "qwen2_5_omni_thinker",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_omni_moe_thinker",
        "qwen3_vl",
        "qwen4_exp",
        "smolvlm",
        "step3p7",
        "unlimited_ocr",
    ),
)


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function family, text -> folder; equal arguments share one."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    made: dict[str, Path] = {}

    def make(family: str, **text: Any) -> Path:
        key = repr((family, sorted(text.items())))
        if key not in made:
            made[key] = make_wrapped(tmp_path_factory.mktemp(family), family, **text)
        return made[key]

    return make


def rename(folder: Path, to: Path, *names: tuple[str, str]) -> Path:
    """Copy a checkpoint, with other beginnings of its tensors' names."""
    shutil.copytree(folder, to)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        begin, other = next(((a, b) for a, b in names if name.startswith(a)), ("", ""))
        tensors[other + name[len(begin) :]] = tensor
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", OURS)
def test_text_is_written_by_our_own_model(wrapped: Any, family: str) -> None:
    assert_as_golden(wrapped(family), PROMPTS, NEW, tolerance=TOLERANCES.get(family, 1e-4))


# Variants of a family that is in others' `text_config` alone.
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("glm5_next", {"index_topk": 512, "linear_lower_bound": None}),  # more than there is
    ("glm5_next", {"index_kpool": 1, "attention_bias": True, "linear_lower_bound": -0.5}),
    (
        "glm5_next",
        {
            **{"index_kpool": 12, "indexer_types": None, "n_group": 2},
            **{"hc_mult": 3, "hc_sinkhorn_iters": 20},
        },
    ),
)


@pytest.mark.parametrize(("family", "text"), VARIANTS, ids=str)
def test_variant(wrapped: Any, family: str, text: dict[str, Any]) -> None:
    folder = wrapped(family, **text)
    assert_as_golden(folder, PROMPTS, NEW, tolerance=TOLERANCES.get(family, 1e-4))


def test_the_cpu_kernels_find_its_weights(wrapped: Any) -> None:
    config = read_config(wrapped("qwen3_vl", head_dim=32))
    spec = decoder_spec(config)
    assert spec is not None and find_unsupported(spec, "float32") is None
    with open_checkpoint(config, spec.names.base) as weights:
        with pack_program(spec, weights, "float32"):
            pass


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "lm_head."),
        ("model.text_model.", "lm_head."),
        ("language_model.model.", "model.language_model.lm_head."),
        ("model.", "lm_head."),
    ],
)
def test_names_that_other_versions_gave(wrapped: Any, tmp_path: Path, text: str, head: str) -> None:
    """They are read as the same tensors; what each holds is compared where it is served."""
    folder = wrapped("llava_next")
    places = (("language_model.model.", text), ("language_model.lm_head.", head))
    before = read_tensors(read_config(folder))
    after = read_tensors(read_config(rename(folder, tmp_path / "other", *places)))
    assert {name: stored.shape for name, stored in after.items()} == {
        name: stored.shape for name, stored in before.items()
    }
    assert "model.layers.1.mlp.up_proj.weight" in after and "lm_head.weight" in after


def test_the_checkpoint_says_whether_its_head_is_tied(wrapped: Any, tmp_path: Path) -> None:
    """Configs of the whole and of its text contradict each other in folders on the hub."""
    folder = Path(shutil.copytree(wrapped("llava_next"), tmp_path / "tied"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = True
    config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    spec = decoder_spec(read_config(folder))
    assert spec is not None and not spec.tied_head
    tensors = load_file(folder / "model.safetensors")
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    spec = decoder_spec(read_config(folder))
    assert spec is not None and spec.tied_head


def test_experts_with_their_inputs_first(wrapped: Any, tmp_path: Path) -> None:
    """As Qwen3-VL's checkpoints on the hub have them; transformers writes outputs first."""
    folder = wrapped("qwen3_vl_moe", moe_intermediate_size=48)
    assert_as_golden(folder, PROMPTS, NEW)
    tensors = load_file(folder / "model.safetensors")
    turned = {n: t.mT.contiguous() if "experts" in n else t for n, t in tensors.items()}
    other = Path(shutil.copytree(folder, tmp_path / "turned"))
    save_file(turned, other / "model.safetensors", metadata={"format": "pt"})
    assert_as_golden(other, PROMPTS, NEW)


def test_what_is_no_part_of_any_sense_is_refused(wrapped: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(wrapped("qwen2_vl"), tmp_path / "more"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors")
    config = read_config(folder)
    with pytest.raises(ModelLoadError, match=r"q_norm.* is no part of a model of type 'qwen2_vl'"):
        check_checkpoint(config, model_spec(config))


# Families whose layers without windows turn nothing.
# Their classes' own heads turn in an odd number of dimensions; no published model has these.
ODD = ("glm4_moe", "glm4v_moe_text", "qwen3_omni_moe_text")
NOWHERE = ("cohere2", "exaone4", "muse_glimmer_text", "nemotron_h")
# Of families whose default sections do not make up a head of their default size.
SECTIONS = {"glm4v_moe_text": [2, 4, 4], "glm4v_text": [16, 24, 24]}


@pytest.mark.parametrize("kind", sorted(DEFAULTS))
def test_sizes_that_the_nested_config_leaves_out(tmp_path: Path, kind: str) -> None:
    """As LLaVA's folders on the hub do: they are those of the type's own class."""
    from transformers import AutoConfig

    said: dict[str, Any] = {
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        **{"n_group": 1, "topk_group": 1},
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "block_auto_adjust_ff_dim": False,  # LFM2's width is what it says
    }
    if kind in SECTIONS:
        said["rope_parameters"] = {"rope_type": "default", "mrope_section": SECTIONS[kind]}
    if kind == "unlimited_ocr_text":
        said["layer_types"] = ["full_attention"] * 12  # those of its default are refused
    content = {"model_type": "llava", "text_config": {"model_type": kind, **said}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    read, theirs = read_config(tmp_path), AutoConfig.for_model(kind)
    theirs.allow_global_per_layer_attribute_access = True
    if kind in ODD:
        with pytest.raises(ModelLoadError, match="dimensions of a head cannot turn in pairs"):
            decoder_spec(read)
        return
    spec = decoder_spec(read)
    assert spec is not None
    assert read.max_positions == theirs.max_position_embeddings
    chosen = spec.vocab_size - spec.extra_tokens
    assert (chosen, spec.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    given = theirs.intermediate_size  # of experts, if there are other names as well
    for name in ("intermediate_size_mlp", "dense_intermediate_size"):
        given = getattr(theirs, name, given)
    mlp_width = given[0] if isinstance(given, list) else given  # of each layer, or of all
    assert (spec.mlp_width, len(spec.layers)) == (mlp_width, theirs.num_hidden_layers)
    assert spec.norm_eps == getattr(theirs, "rms_norm_eps", 1e-5)
    assert spec.heads == theirs.num_attention_heads
    if spec.latent is None:
        assert spec.kv_heads == getattr(theirs, "num_key_value_heads", theirs.num_attention_heads)
        head_dim = getattr(theirs, "head_dim", None)
        assert spec.head_dim == (head_dim or theirs.hidden_size // theirs.num_attention_heads)
        last = spec.layers[-1]  # one that turns nothing, if any does
        assert last.rotary or last.mixer or kind in NOWHERE


def test_adapters_may_name_modules_as_the_whole_does(wrapped: Any) -> None:
    folder = wrapped("llava_next")
    spec = decoder_spec(read_config(folder))
    assert spec is not None
    name = "layers.1.self_attn.o_proj"
    half = StoredTensor(folder, "F32", (4, 64), 0, 1024)
    other = StoredTensor(folder, "F32", (64, 4), 0, 1024)
    for place in ("model.language_model.", "language_model.model.", "model."):
        pair = Pair(place + name, half, other, ("a", "b"), 1.0)
        adapter = Adapter(AdapterConfig(folder, {}), {pair.module: pair})
        (site,) = map_adapter(adapter, spec).linears
        assert site == Site(1, "output")


def test_quantize_writes_models_of_text_alone(wrapped: Any, tmp_path: Path) -> None:
    job = Job(wrapped("llava"), tmp_path / "out", 32, 0.01, False, 1, 16, None)
    with pytest.raises(ConfigurationError, match=r"'llava' reads more than text"):
        quantise_model(job, list)


def test_tokens_of_images_are_read_in_a_text_and_never_said(wrapped: Any) -> None:
    """Llama 3.2 Vision has eight behind its vocabulary."""
    folder = wrapped("mllama")
    runner, recorder = load(folder)
    assert runner.info.vocab_size == VOCAB_SIZE + 8
    (row,) = sequences([[5, VOCAB_SIZE + 3, 7, VOCAB_SIZE]], new=NEW)
    run(runner, [row])
    assert (recorder.logits(row.id)[:, VOCAB_SIZE:] == -torch.inf).all()
    assert_greedy(Golden(folder), recorder, row)


def test_a_text_that_only_transformers_computes(wrapped: Any) -> None:
    folder = wrapped("fuyu", model_type="diffllama")
    assert_as_golden(folder, PROMPTS, NEW, backend="transformers, cached")
