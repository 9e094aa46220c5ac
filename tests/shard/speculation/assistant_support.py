"""Tiny assistants of Gemma 4, as transformers writes them, and what it drafts with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig

from tgi_trio.testing.checkpoints import fill_parameters, make_checkpoint
from tgi_trio.testing.tiny_families import GEMMA4_E

VOCAB, HIDDEN, WINDOW = 512, 64, 8
_OF_HEADS = ("head_dim", "num_key_value_heads")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_SIZES = {"sliding_window": WINDOW, "head_dim": 32, "global_head_dim": 64}
# The last two of the first have no K and V of their own; global values of the second are keys.
BASES: dict[str, dict[str, Any]] = {
    "gemma4_text": GEMMA4_E | {"hidden_size_per_layer_input": 32} | _SIZES,
    "gemma4_unified_text": {"layer_types": [_SLIDING, _FULL] * 2, "num_hidden_layers": 4} | _SIZES,
}


def _allow_assistants() -> None:
    """Mend transformers 5.23.0: it raises for layers that all read others' K and V, which are its
    own assistants, and hands out no K and V of a model whose layers all have their own.
    """
    kinds: tuple[Any, ...] = (Gemma4TextConfig, Gemma4UnifiedTextConfig)
    for kind in kinds:
        own = kind.kv_sharing_modes

        def modes(config: Any, own: Any = own) -> list[str | None]:
            count, types = config.num_hidden_layers, config.layer_types
            if config.num_kv_shared_layers == count:
                return ["reuse"] * count
            if config.num_kv_shared_layers:
                found: list[str | None] = own.fget(config)
                return found
            last = {name: i for i, name in enumerate(types)}
            return ["store" if last[name] == i else None for i, name in enumerate(types)]

        kind.kv_sharing_modes = property(modes)


_allow_assistants()


def gemma4(folder: Path, family: str = "gemma4_text") -> Path:
    """Write a model for which an assistant may draft."""
    return make_checkpoint(folder, family, **BASES[family])


def assistant(
    folder: Path, base: Path, *, clusters: bool = True, seed: int = 7, **text: Any
) -> Path:
    """Write a seeded assistant of the model in `base`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own: Any = AutoConfig.from_pretrained(base)
    windowed, whole = own.per_layer_config[0], own.per_layer_config[1]
    config: Any = AutoConfig.for_model(
        own.model_type.replace("_text", "_assistant"),
        text_config={
            "model_type": own.model_type,
            "vocab_size": own.vocab_size,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
            "num_attention_heads": 8,
            "num_key_value_heads": windowed.num_key_value_heads,
            "head_dim": windowed.head_dim,
            "per_layer_config": {3: {name: getattr(whole, name) for name in _OF_HEADS}},
            "sliding_window": own.sliding_window,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
        | text,
        backbone_hidden_size=own.hidden_size,
        use_ordered_embeddings=clusters,
        num_centroids=32,
        centroid_intermediate_top_k=4,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    fill_parameters(model, seed, minus_one=False)
    if clusters:
        order = torch.randperm(own.vocab_size, generator=torch.Generator().manual_seed(seed))
        model.masked_embedding.token_ordering.copy_(order)
    model.save_pretrained(folder)
    return folder


class AssistantReference:
    """A model and its assistant in transformers, one sequence at a time and nothing kept."""

    def __init__(self, folder: Path, base: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._assistant: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def drafts(self, ids: Sequence[int], count: int) -> list[list[int]]:
        """Return what is drafted behind `ids`, best first, two where rounding may decide."""
        generator = SinglePositionMultiTokenCandidateGenerator(
            self._assistant, self._model.get_input_embeddings(), self._model.generation_config
        )
        generator.num_assistant_tokens, generator.main_model_max_length = count, 4096
        known: Any = torch.tensor([list(ids)])
        outputs = self._model(
            known[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False
        )
        mask = torch.ones_like(known)
        found, logits = generator.get_candidates(
            known,
            model_kwargs={"attention_mask": mask},
            model_outputs=outputs,
            is_first_iteration=False,
            n_last_matches=0,
        )
        assert logits is not None
        drafted = found[0, len(ids) :].tolist()
        both = logits[0].topk(2)
        return [
            own.tolist() if values[0] - values[1] < 1e-4 else [token]
            for token, own, values in zip(drafted, both.indices, both.values, strict=True)
        ]
