"""Servers that are drawn: what they may be made of, as a table, any of it beside any other.

The servers of `kinds.py` are chosen: each is there for what it has. Here families, numbers,
drafters, threads, ranks and adapters come together as they are drawn, and what cannot is refused.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.company.covering import Factors, cover
from tests.company.kinds import Drafter, Kind
from tests.shard.cpu_backend.kernel_support import FITTING
from tests.shard.speculation.eagle_support import eagle, eagle_one
from tests.shard.speculation.heads_support import medusa, mlp_speculator, vllm_medusa
from tests.shard.speculation.mtp_support import add_layers
from tgi_trio.model.config import read_config
from tgi_trio.model.mtp_layers import LAYOUTS
from tgi_trio.testing.checkpoints import make_checkpoint

Drawn = Mapping[str, str]  # of each kind of part, the one that a server has

# Of the families that the kernels compute, those whose parts differ.
FAMILIES: Final = (
    *("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_oss", "bloom", "cohere"),
    *("mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "lfm2"),
    *("qwen3_next", "qwen4_exp_text", "kimi_linear", "bailing_hybrid", "mamba2", "mamba", "jamba"),
    *("nemotron_h", "recurrent_gemma", "zamba2", "falcon_h1", "gemma4_text", "llama4_text"),
    *("minimax_m3_vl_text", "mimo_v2_flash", "granitemoehybrid", "starcoder2", "hy_v4", "gpt2"),
)


# Whose matrices have other names than those that adapters of the tests are for.
_WITHOUT_ADAPTERS: Final = ("bloom", "gpt2", "mamba", "mamba2")


def _sizes(base: Path) -> tuple[int, int]:
    """Return a model's hidden size, and the size of its vocabulary."""
    config = read_config(base)
    values = config.values.get("text_config", config.values)
    hidden = next(
        values[name] for name in ("hidden_size", "n_embd", "d_model", "model_dim") if name in values
    )
    return int(hidden), config.vocab_size


def _medusa(folder: Path, base: Path) -> Path:
    return medusa(folder, base, *_sizes(base), layers=1, own=False)


def _other_medusa(folder: Path, base: Path) -> Path:
    return vllm_medusa(folder, base, *_sizes(base))


def _mlp(folder: Path, base: Path) -> Path:
    return mlp_speculator(folder, base, *_sizes(base), tied=True)


def _eagle(folder: Path, base: Path) -> Path:
    return eagle(folder, base, _sizes(base)[1])


def _new_eagle(folder: Path, base: Path) -> Path:
    vocab = _sizes(base)[1]
    return eagle(folder, base, vocab, speculators=True, newer="fc_norm", window=24)


def _first_eagle(folder: Path, base: Path) -> Path:
    return eagle_one(folder, base, _sizes(base)[1])


def _smaller(family: str) -> Drafter:
    """Return what writes a smaller model of a family, with the vocabulary of the one it is for."""

    def write(folder: Path, base: Path) -> Path:
        own = FITTING[family] | {"vocab_size": _sizes(base)[1], "seed": 5}
        return make_checkpoint(folder, family, **own)

    return write


# What drafts, and what a server is told for it.
DRAFTERS: Final[Mapping[str, tuple[Drafter | None, Mapping[str, Any]]]] = {
    "nobody": (None, {}),
    "n-grams": (None, {"drafter": "ngram", "speculate": 3}),
    "many n-grams": (None, {"drafter": "ngram", "speculate": 7}),
    "own layers": (None, {"drafter": "mtp", "speculate": 3}),
    "medusa": (_medusa, {}),
    "other medusa": (_other_medusa, {}),
    "mlp": (_mlp, {}),
    "eagle": (_eagle, {}),
    "new eagle": (_new_eagle, {"speculate": 5}),
    "first eagle": (_first_eagle, {"speculate": 1}),
    "smaller llama": (_smaller("llama"), {"speculate": 3}),
    "smaller gemma2": (_smaller("gemma2"), {"speculate": 5}),
    "smaller lfm2": (_smaller("lfm2"), {"speculate": 3}),
    "smaller deepseek_v32": (_smaller("deepseek_v32"), {"speculate": 2}),
}

SETTINGS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "numbers": {
        "float32": {},
        "bfloat16": {"dtype": "bfloat16"},
    },
    "weights": {
        "as stored": {},
        "eetq": {"quantize": "eetq"},
        "int4": {"quantize": "int4"},
        "int4, activations of 16 bits": {"quantize": "int4", "activations": 16},
        "q4_k": {"quantize": "q4_k"},
        "q5_0": {"quantize": "q5_0"},
        "q8_0": {"quantize": "q8_0"},
        "q8_0, activations of 8 bits": {"quantize": "q8_0", "activations": 8},
    },
    "kv": {
        "as computed": {},
        "e4m3": {"kv_cache_dtype": "fp8_e4m3fn"},
        "e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    },
    "threads": {"one": {}, "two": {"cpu_threads": 2}},
    "ranks": {
        "one": {},
        "two": {"world_size": 2},
        "two stages": {"world_size": 2, "pipeline_stages": 2},
    },
}
PARTS: Final[Factors] = {
    "family": list(FAMILIES),
    "drafter": list(DRAFTERS),
    **{kind: list(each) for kind, each in SETTINGS.items()},
    "adapters": ["none", "two"],
}


@dataclass(frozen=True)
class Mixture:
    """A server that has been drawn."""

    parts: Drawn

    @property
    def name(self) -> str:
        """Its parts, as far as they say something."""
        plain = {kind: levels[0] for kind, levels in PARTS.items() if kind != "family"}
        own = [each for kind, each in self.parts.items() if plain.get(kind) != each]
        return ", ".join(own)

    def kind(self) -> Kind:
        """Return what it is made of; the CPU kernels serve it, whose answers are exact."""
        family, (make_drafter, told) = self.parts["family"], DRAFTERS[self.parts["drafter"]]
        settings: dict[str, Any] = {"cpu_backend": "kernels", **told}
        for kind, levels in SETTINGS.items():
            settings |= levels[self.parts[kind]]

        def write(folder: Path) -> Path:
            own = dict(FITTING[family])
            if self.parts["drafter"] == "own layers":
                own["tie_word_embeddings"] = False
            made = make_checkpoint(folder, family, **own)
            return add_layers(made) if self.parts["drafter"] == "own layers" else made

        return Kind(write, settings, make_drafter, adapted=self.parts["adapters"] == "two")


def draw_mixtures(seed: int) -> Iterator[Mixture]:
    """Yield servers without end, in whose parts any two meet."""
    draw = random.Random(seed)
    while True:
        rows = cover(PARTS, draw.getrandbits(30))
        draw.shuffle(rows)
        for row in rows:
            if row["ranks"] == "two stages":  # which go with neither
                row |= {"drafter": "nobody", "adapters": "none"}
            if row["family"] in _WITHOUT_ADAPTERS:
                row["adapters"] = "none"
            if row["drafter"] == "own layers" and row["family"] not in LAYOUTS:
                row["drafter"] = "n-grams"
            yield Mixture({kind: row[kind] for kind in PARTS})
