"""The servers that companies meet, as a table: models, backends, ranks, who drafts for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tests.company.texts import SPARE, teach
from tests.shard.cpu_backend.kernel_support import FITTING
from tests.shard.media import audio_models
from tests.shard.media.images_support import make_folder
from tests.shard.speculation.assistant_support import assistant, gemma4
from tests.shard.speculation.eagle_support import eagle, eagle_one
from tests.shard.speculation.heads_support import medusa, mlp_speculator
from tests.shard.speculation.mtp_support import add_layers, mtp_checkpoint
from tgi_trio.testing.checkpoints import VOCAB_SIZE, make_checkpoint

_HIDDEN = 64

Write = Callable[[Path], Path]  # a model's folder, made in the folder given
Drafter = Callable[[Path, Path], Path]  # a drafter's, for the model in the second


@dataclass(frozen=True)
class Kind:
    """A server that can be made."""

    model: Write
    settings: Mapping[str, Any] = field(default_factory=dict)
    make_drafter: Drafter | None = None
    adapted: bool = False  # whether it has adapters
    text: Write | None = None  # of which adapters are made; None: the model
    called: bool = False  # whether it is asked over HTTP
    family: str = ""  # that sees images, or hears; "": it reads text alone


def _family(name: str, **overrides: Any) -> Write:
    return lambda folder: make_checkpoint(folder, name, **overrides)


def _spoken(write: Write) -> Write:
    """Return what writes a model whose tokenizer and template know all that clients may ask for."""
    return lambda folder: teach(write(folder))


def _fitting(name: str) -> Write:
    return _family(name, **FITTING[name])


def _layers(name: str, **overrides: Any) -> Write:
    return lambda folder: mtp_checkpoint(
        folder, name, **{"tie_word_embeddings": False, **overrides}
    )


def _eagle(folder: Path, base: Path) -> Path:
    return eagle(folder, base, VOCAB_SIZE)


# Families whose sounds and images are made as the server makes them.
MADE: Final = (*audio_models.FAMILIES, "granite_speech", "phi4_multimodal")


def _seeing(name: str, settings: Mapping[str, Any], **text: Any) -> Kind:
    """Return a server of a family that sees images, or hears sounds."""
    if name in audio_models.FAMILIES:
        return Kind(lambda folder: _hearing(folder, name), settings, family=name)
    return Kind(lambda folder: make_folder(folder, name, **text), settings, family=name)


def _hearing(folder: Path, name: str) -> Path:
    return audio_models.make_folder(folder, name)[0]


def _cropped(folder: Path) -> Path:
    """Write a LLaVA whose tokenizer says how many tokens an image has."""
    make_folder(folder, "llava", head_dim=32, **_ROWS)
    told = json.loads((folder / "preprocessor_config.json").read_text())
    crop = {"crop_size": {"height": 16, "width": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(told | crop))
    return folder


def _granite(folder: Path) -> Path:
    from tests.shard.media.granite_models import make_granite

    return make_granite(folder, head_dim=32, vocab_size=VOCAB_SIZE + 4 + SPARE).folder


def _phi4(folder: Path) -> Path:
    from tests.shard.media.phi4_models import make_phi4

    return make_phi4(folder, spare=SPARE).folder


def _smaller(folder: Path, base: Path) -> Path:
    return make_checkpoint(folder, "llama", head_dim=32, num_hidden_layers=1, seed=5)


_LLAMA = _family("llama", head_dim=32)
# Of whose texts users' adapters are made.
_GRANITE_TEXT = _family("granite", head_dim=32)
_PHI4_TEXT = _family("phi3", intermediate_size=96)
_ROWS = {"vocab_size": VOCAB_SIZE + SPARE}
_ROOMY = _family("llama", head_dim=32, **_ROWS)
_KERNELS = {"cpu_backend": "kernels"}
_TORCH = {"cpu_backend": "torch"}
_NGRAMS = {"drafter": "ngram", "speculate": 3}
_MTP = {"drafter": "mtp", "speculate": 2}
# Of texts whose positions are threefold, with heads that the kernels fit.
_TURNS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]}
}
_GLM = {**_TURNS, "num_attention_heads": 2, "num_key_value_heads": 1}
# Of which two ranks can have parts that fit the kernels.
_DIVIDED = _family("llama", head_dim=32, intermediate_size=128)
_TWO = {"world_size": 2}
_STAGES = {"world_size": 2, "pipeline_stages": 2}
_THREE_STAGES = {"world_size": 3, "pipeline_stages": 3}
_HOST = {"prefix_cache_host_bytes": 1 << 20}

KINDS: Final[Mapping[str, Kind]] = {
    # --- the CPU kernels, equal to the bit
    "llama, kernels": Kind(_LLAMA, _KERNELS, adapted=True),
    "llama, kernels, n-grams": Kind(_LLAMA, _KERNELS | _NGRAMS, adapted=True),
    "llama, kernels, over HTTP": Kind(_spoken(_ROOMY), _KERNELS, called=True),
    "llama, kernels, n-grams, over HTTP": Kind(_spoken(_ROOMY), _KERNELS | _NGRAMS, called=True),
    "lfm2, kernels, over HTTP": Kind(
        _spoken(_family("lfm2", **FITTING["lfm2"] | _ROWS)), _KERNELS | _NGRAMS, called=True
    ),
    "llama, kernels, adapters, over HTTP": Kind(
        _spoken(_ROOMY), _KERNELS | _NGRAMS, called=True, adapted=True
    ),
    "llama, kernels, eagle": Kind(
        _LLAMA, _KERNELS, lambda at, base: eagle(at, base, VOCAB_SIZE), adapted=True
    ),
    "llama, kernels, first eagle": Kind(
        _LLAMA, _KERNELS, lambda at, base: eagle_one(at, base, VOCAB_SIZE)
    ),
    "llama, kernels, medusa": Kind(
        _LLAMA,
        _KERNELS,
        lambda at, base: medusa(at, base, _HIDDEN, VOCAB_SIZE, layers=1, own=False),
        adapted=True,
    ),
    "llama, kernels, mlp": Kind(
        _LLAMA, _KERNELS, lambda at, base: mlp_speculator(at, base, _HIDDEN, VOCAB_SIZE, tied=False)
    ),
    "llama, kernels, smaller": Kind(_LLAMA, _KERNELS | {"speculate": 3}, _smaller, adapted=True),
    "llama, kernels, kv of 8 bits": Kind(_LLAMA, _KERNELS | {"kv_cache_dtype": "fp8_e4m3fn"}),
    "llama, kernels, int4": Kind(_LLAMA, _KERNELS | {"quantize": "int4"}, adapted=True),
    "llama, kernels, eetq": Kind(_LLAMA, _KERNELS | {"quantize": "eetq"}),
    **{
        f"{name}, kernels": Kind(_fitting(name), _KERNELS | _NGRAMS)
        for name in (
            *("mistral", "gemma2", "gpt_oss", "bloom", "mixtral", "deepseek_v3", "deepseek_v32"),
            *("glm_moe_dsa", "lfm2", "qwen3_next", "kimi_linear", "mamba2", "jamba"),
            *("recurrent_gemma", "gemma4_text", "zamba2", "qwen4_exp_text", "minimax_m3_vl_text"),
            *("llama4_text", "falcon_h1"),
        )
    },
    **{
        f"{name}, kernels, mtp": Kind(_layers(name, **FITTING.get(name, {})), _KERNELS | _MTP)
        for name in ("qwen3_next", "deepseek_v3", "deepseek_v32", "qwen4_exp_text", "glm4_moe")
    },
    "gemma4, kernels, assistant": Kind(gemma4, _KERNELS | {"speculate": 3}, assistant),
    # --- ranks that divide layers among them, or have some each; sums of two are the same
    "llama, kernels, two ranks": Kind(_DIVIDED, _KERNELS | _TWO | _NGRAMS),
    "gemma2, kernels, two ranks": Kind(_fitting("gemma2"), _KERNELS | _TWO | _NGRAMS),
    "llama, kernels, two stages": Kind(_DIVIDED, _KERNELS | _STAGES),
    "llama, kernels, three stages": Kind(
        _family("llama", **FITTING["llama"], num_hidden_layers=4), _KERNELS | _THREE_STAGES
    ),
    "granitemoehybrid, kernels, two stages": Kind(_fitting("granitemoehybrid"), _KERNELS | _STAGES),
    # --- torch, equal but for rounding
    "llama, torch": Kind(_LLAMA, _TORCH | _HOST, adapted=True),
    "llama, torch, n-grams": Kind(_LLAMA, _TORCH | _NGRAMS, adapted=True),
    "llama, torch, eagle": Kind(
        _LLAMA,
        _TORCH | _HOST,
        lambda at, base: eagle(at, base, VOCAB_SIZE),
        adapted=True,
    ),
    "llama, torch, first eagle": Kind(
        _LLAMA, _TORCH, lambda at, base: eagle_one(at, base, VOCAB_SIZE)
    ),
    "llama, torch, medusa": Kind(
        _LLAMA, _TORCH, lambda at, base: medusa(at, base, _HIDDEN, VOCAB_SIZE, layers=1, own=False)
    ),
    "llama, torch, mlp": Kind(
        _LLAMA, _TORCH, lambda at, base: mlp_speculator(at, base, _HIDDEN, VOCAB_SIZE, tied=False)
    ),
    "llama, torch, smaller": Kind(_LLAMA, _TORCH | {"speculate": 3}, _smaller, adapted=True),
    "llama, torch, kv of 8 bits": Kind(_LLAMA, _TORCH | {"kv_cache_dtype": "fp8_e4m3fn"}),
    **{
        f"{name}, torch": Kind(_family(name), _TORCH | _NGRAMS | _HOST)
        for name in (
            *("gemma2", "gpt_oss", "deepseek_v3", "deepseek_v32", "deepseek_v4", "hy_v4"),
            *("lfm2", "qwen3_next", "kimi_linear", "mamba", "jamba", "recurrent_gemma"),
            *("gemma3n_text", "zamba2", "qwen4_exp_text", "minimax_m3_vl_text", "bailing_hybrid"),
            *("llama4_text", "longcat_flash", "gemma4_text"),
        )
    },
    **{
        f"{name}, torch, mtp": Kind(_layers(name), _TORCH | _MTP | _HOST)
        for name in ("qwen3_next", "deepseek_v3", "deepseek_v32", "deepseek_v4", "hy_v4")
    },
    **{
        f"{name}, torch, mtp": Kind(_layers(name), _TORCH | _MTP)
        for name in ("qwen4_exp_text", "glm5_next_text", "step3p5", "nemotron_h", "longcat_flash")
    },
    "mimo_v2_flash, torch, mtp": Kind(
        lambda folder: mtp_checkpoint(folder, "mimo_v2_flash", layers=3, tie_word_embeddings=False),
        _TORCH | {"drafter": "mtp", "speculate": 3},
    ),
    "gemma4, torch, assistant": Kind(gemma4, _TORCH | {"speculate": 3}, assistant),
    # --- with images and sounds: of one's text, kernels or torch; of their own, torch
    **{
        f"{name}, kernels": _seeing(name, _KERNELS | settings, head_dim=32, **sizes)
        for name, settings, sizes in (
            ("llava", _NGRAMS, {}),
            ("granite4_vision", {}, {"hidden_size": 128}),
            ("glm4v", _NGRAMS, _GLM),
            ("paddleocr_vl", {}, _TURNS),
            ("qwen3_5", _NGRAMS, {"linear_key_head_dim": 32, "linear_value_head_dim": 32}),
        )
    },
    **{
        f"{name}, torch": _seeing(name, _TORCH | _NGRAMS | _HOST)
        for name in (
            *("llava", "gemma3", "gemma4_unified", "paligemma", "qwen2_vl", "qwen3_vl"),
            *("mllama", "idefics", "minicpmv4_7", "qwen3_5", "glm5_next", "qwen2_audio"),
        )
    },
    "llama, torch, two ranks": Kind(_LLAMA, _TORCH | _TWO | _NGRAMS | _HOST, adapted=True),
    "llama, torch, eagle, two ranks": Kind(
        _LLAMA, _TORCH | _TWO, lambda at, base: eagle(at, base, VOCAB_SIZE)
    ),
    "qwen3_next, torch, two ranks": Kind(_family("qwen3_next"), _TORCH | _TWO | _NGRAMS | _HOST),
    "llama, torch, two stages": Kind(_LLAMA, _TORCH | _STAGES),
    "qwen3_next, torch, two stages": Kind(_family("qwen3_next"), _TORCH | _STAGES),
    "t5, torch, two ranks": Kind(_family("t5"), _TORCH | _TWO),
    **{
        f"{name}, torch, two ranks": _seeing(name, _TORCH | _TWO | _HOST)
        for name in ("llava", "qwen3_vl", "mllama")
    },
    # Beside images: who drafts, and adapters.
    "llava, kernels, eagle": replace(_seeing("llava", _KERNELS, head_dim=32), make_drafter=_eagle),
    "llava, kernels, smaller": replace(
        _seeing("llava", _KERNELS | {"speculate": 3}, head_dim=32), make_drafter=_smaller
    ),
    "llava, kernels, adapters": replace(
        _seeing("llava", _KERNELS | _NGRAMS, head_dim=32), adapted=True, text=_LLAMA
    ),
    "llava, torch, eagle": replace(_seeing("llava", _TORCH | _HOST), make_drafter=_eagle),
    # Over HTTP, where images and sounds are in bodies.
    "llava, kernels, over HTTP": replace(
        _seeing("llava", _KERNELS | _NGRAMS), model=_spoken(_cropped), called=True
    ),
    # Whose own adapters act where a prompt has what they are for, beside those of users.
    "granite_speech, kernels": Kind(
        _granite, _KERNELS | _NGRAMS, adapted=True, text=_GRANITE_TEXT, family="granite_speech"
    ),
    "granite_speech, torch": Kind(
        _granite, _TORCH, adapted=True, text=_GRANITE_TEXT, family="granite_speech"
    ),
    "granite_speech, kernels, over HTTP": Kind(
        *(_spoken(_granite), _KERNELS),
        adapted=True,
        text=_GRANITE_TEXT,
        called=True,
        family="granite_speech",
    ),
    "phi4_multimodal, kernels": Kind(
        _phi4, _KERNELS, adapted=True, text=_PHI4_TEXT, family="phi4_multimodal"
    ),
    "phi4_multimodal, kernels, over HTTP": Kind(
        _spoken(_phi4),
        _KERNELS,
        adapted=True,
        text=_PHI4_TEXT,
        called=True,
        family="phi4_multimodal",
    ),
    "phi4_multimodal, torch": Kind(
        _phi4, _TORCH, adapted=True, text=_PHI4_TEXT, family="phi4_multimodal"
    ),
    "llava, torch, adapters": replace(
        _seeing("llava", _TORCH | _NGRAMS | _HOST), adapted=True, text=_family("llama")
    ),
    "qwen3_5, torch, mtp": replace(
        _seeing("qwen3_5", _TORCH | _MTP | _HOST),
        model=lambda folder: add_layers(make_folder(folder, "qwen3_5")),
    ),
    "t5, torch": Kind(_family("t5"), _TORCH),
    "bart, torch": Kind(_family("bart"), _TORCH),
}


_SMALL = _family("llama", num_hidden_layers=1)
# On a device, which a stand-in is here: with recordings of decodes, and steps that follow others.
DEVICES: Final[Mapping[str, Kind]] = {
    "llama": Kind(_SMALL),
    "llama, n-grams": Kind(_SMALL, _NGRAMS),
    "llama, medusa": Kind(
        _SMALL, {}, lambda at, base: medusa(at, base, _HIDDEN, VOCAB_SIZE, layers=1, own=False)
    ),
    "llama, eagle": Kind(_LLAMA, _HOST, lambda at, base: eagle(at, base, VOCAB_SIZE)),
    "llama, kv of 8 bits": Kind(_SMALL, {"kv_cache_dtype": "fp8_e4m3fn"}),
    "lfm2, n-grams": Kind(
        _family("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        _NGRAMS | _HOST,
    ),
    "gemma2": Kind(_family("gemma2", sliding_window=24)),
    "deepseek_v32": Kind(_family("deepseek_v32"), _HOST),
    "deepseek_v4, mtp": Kind(_layers("deepseek_v4"), _MTP),
    "qwen3_next, mtp": Kind(_layers("qwen3_next"), _MTP | _HOST),
    "llava": _seeing("llava", _HOST, num_hidden_layers=1),
    "qwen3_vl": _seeing("qwen3_vl", {}),
}
