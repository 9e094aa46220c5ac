"""EAGLE-3 drafters as their authors and `speculators` write them, and the paper's formulas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests.shard.speculation.heads_support import Tensors, write_heads

HIDDEN, TARGET, HEADS, KV_HEADS, DIM, INNER = 64, 64, 4, 2, 16, 96
DRAFT_TOKENS = 300  # tokens that the drafter knows, of the model's
THETA, EPS = 5000.0, 1e-5
TAPS = (0, 1, 2)  # layers of a model of two whose input is read; 2: what leaves the last


def _draw_tensors(
    layer: str, taps: int, vocab: int, tokens: int, *, own_table: bool, seed: int
) -> Tensors:
    """Return a drafter's tensors, those of its layer behind the name `layer`."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator)

    heads, kv_heads = HEADS * DIM, KV_HEADS * DIM
    tensors: Tensors = {
        "fc.weight": random(HIDDEN, taps * TARGET),
        f"{layer}self_attn.q_proj.weight": random(heads, 2 * HIDDEN),
        f"{layer}self_attn.k_proj.weight": random(kv_heads, 2 * HIDDEN),
        f"{layer}self_attn.v_proj.weight": random(kv_heads, 2 * HIDDEN),
        f"{layer}self_attn.o_proj.weight": random(HIDDEN, heads),
        f"{layer}mlp.gate_proj.weight": random(INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": random(INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": random(HIDDEN, INNER),
        f"{layer}input_layernorm.weight": 1 + random(HIDDEN),
        f"{layer}hidden_norm.weight": 1 + random(HIDDEN),
        f"{layer}post_attention_layernorm.weight": 1 + random(HIDDEN),
        "norm.weight": 1 + random(HIDDEN),
        "lm_head.weight": random(tokens, HIDDEN),
    }
    kept = torch.randperm(vocab, generator=generator)[:tokens].sort().values
    tensors["d2t"] = kept - torch.arange(tokens)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    if own_table:
        tensors["embed_tokens.weight"] = random(vocab, HIDDEN, scale=1.0)
    return tensors


def _draw_norms(newer: str, taps: int, seed: int) -> Tensors:
    """Return the norms before `fc`: one of all states, or one of each."""
    sizes = {f"fc_norm.{i}": TARGET for i in range(taps)}
    if newer == "norm_before_fc":
        sizes = {"input_norm": taps * TARGET}
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight": 1 + 0.3 * torch.randn(size, generator=generator)
        for name, size in sizes.items()
    }


def _layer_config(vocab: int, window: int) -> dict[str, Any]:
    """Return what config.json says of the drafter's layer; `window` 0: it sees everything."""
    own: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
    }
    if window:
        own |= {"layer_types": ["sliding_attention"], "sliding_window": window}
    return own


def eagle(
    folder: Path,
    base: Path,
    vocab: int,
    *,
    speculators: bool = False,
    taps: Sequence[int] = TAPS,
    own_table: bool = False,
    tokens: int = DRAFT_TOKENS,
    seed: int = 0,
    newer: str = "",
    window: int = 0,
) -> Path:
    """Write a seeded drafter: in its authors' format, or that of the library `speculators`.

    `newer`: with EAGLE 3.1's norms, of which this is the one before `fc`.
    """
    layer, wide = "layers.0." if speculators else "midlayer.", len(taps)
    tensors = _draw_tensors(layer, wide, vocab, tokens, own_table=own_table, seed=seed)
    own = _layer_config(vocab, window)
    norms: dict[str, Any] = {newer: True, "norm_output": True} if newer else {}
    if newer:
        tensors |= _draw_norms(newer, wide, seed + 1)
    if not speculators:
        config = own | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": tokens,
            "base_model_name_or_path": str(base),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in taps]} | norms,
        }
        return write_heads(folder, config, tensors, "model.safetensors")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": tokens,
        "norm_before_residual": True,
        **norms,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "transformer_layer_config": own,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(base), "architectures": ["LlamaForCausalLM"]},
        },
    }
    return write_heads(folder, config, tensors, "model.safetensors")


def eagle_one(folder: Path, base: Path, vocab: int, *, biased: bool = False, seed: int = 0) -> Path:
    """Write a seeded EAGLE drafter as its authors do: nothing but its tensors says what it is.

    `biased`: like those for Qwen 2, and with a copy of the model's embedding.
    """
    drawn = _draw_tensors("layers.0.", 2, vocab, 1, own_table=biased, seed=seed)
    unlike = ("input_layernorm", "hidden_norm", "norm.weight", "lm_head", "d2t", "t2d")
    tensors = {name: x for name, x in drawn.items() if not name.startswith(unlike)}
    tensors = {name: x for name, x in tensors.items() if not name[9:].startswith(unlike)}
    generator = torch.Generator().manual_seed(seed + 1)
    for name in "qkv":
        matrix = f"layers.0.self_attn.{name}_proj"
        tensors[f"{matrix}.weight"] = tensors[f"{matrix}.weight"][:, :HIDDEN]
        if biased:
            size = len(tensors[f"{matrix}.weight"])
            tensors[f"{matrix}.bias"] = 0.3 * torch.randn(size, generator=generator)
    if biased:
        tensors["fc.bias"] = 0.3 * torch.randn(HIDDEN, generator=generator)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
    }
    return write_heads(folder, config, tensors, "model.safetensors")


class EagleReference:
    """A drafter beside a model of transformers, one sequence at a time and nothing kept."""

    def __init__(self, folder: Path, base: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self._model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._w = load_file(folder / "model.safetensors")
        self._layer = next(n for n in self._w if n.endswith("q_proj.weight")).removesuffix(
            "self_attn.q_proj.weight"
        )
        self._norms_residual = config.get("norm_before_residual", False)
        self._norms_output = (config | config.get("eagle_config", {})).get("norm_output", False)
        self._window = (config | config.get("transformer_layer_config", {})).get("sliding_window")
        model: Any = self._model
        table = model.get_input_embeddings().weight.detach()
        self._table = self._w.get("embed_tokens.weight", table)
        taps = config.get("eagle_aux_hidden_state_layer_ids")
        stated = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [])
        self._taps = taps or [i + 1 for i in stated]

    @torch.inference_mode()
    def drafts(self, ids: Sequence[int], count: int) -> list[list[int]]:
        """Return what is drafted behind `ids`, best first, two where rounding may decide."""
        states = self._normalise_inputs(self._model_states(ids[:-1])) @ self._w["fc.weight"].T
        tokens, found = list(ids[1:]), []
        while True:
            out = self._run(torch.tensor(tokens), states)
            normed = self._norm("norm", out)
            logits = self._w["lm_head.weight"] @ normed[-1]
            best = logits.topk(2)
            rows = best.indices if best.values[0] - best.values[1] < 1e-3 else best.indices[:1]
            found.append([int(i + self._w["d2t"][i]) for i in rows])
            if len(found) == count:
                return found
            tokens.append(found[-1][0])
            states = torch.cat((states, (normed if self._norms_output else out)[-1:]))

    def _normalise_inputs(self, states: torch.Tensor) -> torch.Tensor:
        if "input_norm.weight" in self._w:
            return self._norm("input_norm", states)
        if "fc_norm.0.weight" not in self._w:
            return states
        parts = states.split(TARGET, dim=-1)
        return torch.cat([self._norm(f"fc_norm.{i}", x) for i, x in enumerate(parts)], dim=-1)

    def _model_states(self, ids: Sequence[int]) -> torch.Tensor:
        """Return [T, all that is read]: what goes into the layers, and what leaves the last."""
        left: list[torch.Tensor] = []
        norm: Any = self._model.model.norm
        hook = norm.register_forward_pre_hook(lambda _, x: left.append(x[0]))
        found = self._model.model(torch.tensor([list(ids)]), output_hidden_states=True)
        hook.remove()
        states = [*found.hidden_states[:-1], left[0]]
        return torch.cat([states[i][0] for i in self._taps], dim=-1)

    def _run(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        w, layer, count = self._w, self._layer, len(tokens)
        normed = self._norm(f"{layer}hidden_norm", states)
        embedded = self._norm(f"{layer}input_layernorm", self._table[tokens])
        x = torch.cat((embedded, normed), dim=-1)
        q, k, v = (
            (x @ w[f"{layer}self_attn.{n}_proj.weight"].T).view(count, -1, DIM).transpose(0, 1)
            for n in "qkv"
        )
        return self._finish(normed if self._norms_residual else states, q, k, v)

    def _finish(
        self, residual: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Return what leaves the layer, for unrotated heads [heads, T, DIM]."""
        w, layer, count = self._w, self._layer, len(residual)
        q, k = _turn(q), _turn(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (k, v))
        scores = q @ k.transpose(1, 2) / DIM**0.5
        hidden = torch.ones(count, count).triu(1)
        if self._window:
            hidden += torch.ones(count, count).tril(-self._window)
        scores = scores.masked_fill(hidden.bool(), float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        x = residual + attended @ w[f"{layer}self_attn.o_proj.weight"].T
        y = self._norm(f"{layer}post_attention_layernorm", x)
        inner = functional.silu(y @ w[f"{layer}mlp.gate_proj.weight"].T)
        inner = inner * (y @ w[f"{layer}mlp.up_proj.weight"].T)
        return x + inner @ w[f"{layer}mlp.down_proj.weight"].T

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return x * scale * self._w[f"{name}.weight"]


class EagleOneReference(EagleReference):
    """The same for EAGLE's first drafters (Li and others 2024)."""

    @torch.inference_mode()
    def drafts(self, ids: Sequence[int], count: int) -> list[list[int]]:
        known = torch.tensor([list(ids[:-1])])
        states = self._model.model(known).last_hidden_state[0]
        tokens, found = list(ids[1:]), []
        while True:
            table = self._model.get_input_embeddings().weight
            x = self._multiply("fc", torch.cat((table[tokens], states), dim=-1))
            q, k, v = (
                self._multiply(f"{self._layer}self_attn.{name}_proj", x)
                .view(len(tokens), -1, DIM)
                .transpose(0, 1)
                for name in "qkv"
            )
            out = self._finish(x, q, k, v)
            best = self._model.lm_head(out[-1]).topk(2)
            rows = best.indices if best.values[0] - best.values[1] < 1e-3 else best.indices[:1]
            found.append(rows.tolist())
            if len(found) == count:
                return found
            tokens.append(found[-1][0])
            states = torch.cat((states, out[-1:]))

    def _multiply(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._w[f"{name}.weight"], self._w.get(f"{name}.bias"))


def _turn(x: torch.Tensor) -> torch.Tensor:
    """Rotate [heads, T, DIM]; the first token is at position 0."""
    frequencies = THETA ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
