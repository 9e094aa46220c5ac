"""Types of transformers that do not generate token by token with plain forward passes.

The types in these tables are refused before there is a shard. Other types are compared with
transformers' own generate when they are loaded (`torch_backend/fallback/autoregression.py`), which
would find the same of these.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.qwen3_asr import QWEN3_ASR

SEES_ON: Final = "its tokens see those that follow them, so it does not write one after the other"
SAY_DECODER: Final = "; if it was trained as a decoder, say is_decoder: true in its config.json"
FED_OTHERWISE: Final = (
    "transformers' own generate does not feed it the tokens so far, and they alone"
)

# Encoders, which attend both ways unless config.json calls them decoders.
_ENCODERS: Final = frozenset(
    {
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
        *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
        *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)


def find_unserved_type(config: ModelConfig) -> str | None:
    """Return why a type of transformers does not generate by plain passes, or None if it may."""
    name = config.model_type
    if name in _ENCODERS:
        return None if config.get("is_decoder") else SEES_ON + SAY_DECODER
    if name == "xlnet":
        return SEES_ON
    if name == "xlm":  # generate appends a token to be predicted
        return FED_OTHERWISE if config.get("causal") else SEES_ON
    return None


def find_classes(config: ModelConfig) -> str | None:
    """Return why a model's head chooses no tokens, or None where config.json does not say so.

    Qwen3-ForcedAligner is of the type of Qwen3-ASR, or of its own, by who published it.
    """
    kind, classes = config.model_type, config.get("classify_num")
    if kind.startswith("qwen3_forced_aligner") or (kind == QWEN3_ASR and classes):
        return (
            f"its head tells by one of {classes or 'several'} classes when a word of a given text "
            "is spoken"
        )
    return None


def writing_refusal(model_type: str, why: str) -> str:
    """Return the refusal of a type that would be served with wrong tokens."""
    return f"Model type {model_type!r} cannot be served as a model that generates text: {why}."
