"""How ranks divide a model of transformers: the plan that comes with it, read as cuts and joins.

Such a plan (`base_model_tp_plan` in a type's configuration, `_tp_plan` in its classes) names
modules and parameters, layers' numbers as `*`, and a style for each (`styles.py`). Here it becomes
the cuts of parameters and the joins of modules for one rank. transformers itself carries it out
with DTensors over a process group of the whole program, which ours do not have
(`ranks/distributed.py`): here every tensor is a plain one, and modules call the collectives that
our own models call.

A plan is data that nobody has tried with this model: `proving.py` does, before it is used.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.split import Portion, even_share
from tgi_trio.shard.torch_backend.fallback.cuts import Alone, AxisShare, Part
from tgi_trio.shard.torch_backend.fallback.styles import STYLES, Style
from tgi_trio.shard.torch_backend.models.decoder import Ranks

_LAYER: Final = re.compile(r"\.\d+(\.|$)")
_ATTENTION: Final = re.compile(r"attn|attention")


@dataclass(frozen=True, slots=True)
class Division:
    """One rank's division of a model; names are those of the model's parameters and modules."""

    parts: dict[str, Part]  # of parameters; the others are whole on every rank
    styles: dict[str, Style]  # of modules whose results are joined

    def numbers(self, model: torch.nn.Module) -> int:
        """Return how many numbers this rank's parts of a whole model's parameters have."""
        whole = ((name, tuple(p.shape)) for name, p in model.named_parameters())
        shapes = (self.parts[n].own_shape(s) if n in self.parts else s for n, s in whole)
        return sum(map(math.prod, shapes))

    def divide(self, model: torch.nn.Module, ranks: Ranks) -> None:
        """Leave a model this rank's parts, and have its modules join theirs with the others'.

        Tied parameters stay tied. Parameters of no memory (on `meta`) only change their shapes.
        """
        # By id, with the whole one, whose id would else be another's.
        made: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        for name, part in self.parts.items():
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            whole = module.get_parameter(leaf)
            if id(whole) not in made:
                own = torch.nn.Parameter(part.take(whole.data), requires_grad=False)
                made[id(whole)] = whole, own
            module.register_parameter(leaf, made[id(whole)][1])
        for name, style in self.styles.items():
            if style.join is not None:
                module = model.get_submodule(name)
                module.forward = style.join(module.forward, module, ranks)


def read_division(model: Any, portion: Portion) -> Division:
    """Return a rank's division of a model of transformers, whose parameters are whole.

    Raises ModelLoadError for a model without a plan, a style that is not known, and counts that
    cannot be split.
    """
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    kind = model.config.model_type
    if not any("*" in name for name in plan):
        raise ModelLoadError(
            f"Model type {kind!r} runs through transformers, which has no plan of how to split its "
            "layers over shards (base_model_tp_plan); use --num-shard 1."
        )
    parts: dict[str, Part] = {}
    styles: dict[str, Style] = {}
    for path, module in model.named_modules():
        if (own := plan.get(_generic(path))) is not None:
            styles[path] = _find_style(own, path, kind)
            if styles[path].along == "outputs" and _ATTENTION.search(path):
                _check_heads(model.config, portion.ranks)
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            word = plan.get(_generic(name), own)
            if leaf == "bias" and path in styles and styles[path].sums:
                word = own  # it is added once, whatever its own style says
            if word is not None:
                part = _part_of(_find_style(word, name, kind), name, parameter, portion)
                parts |= {} if part is None else {name: part}
    return _without_odd_ties(model, Division(parts, styles))


def _generic(name: str) -> str:
    """Return the name of a parameter or module as plans have it."""
    return _LAYER.sub(r".*\1", name)


def _find_style(word: str, name: str, kind: str) -> Style:
    if word not in STYLES:
        raise ModelLoadError(
            f"Model type {kind!r} runs through transformers, whose plan splits {name} by {word!r}, "
            f"which is not one of the styles that are served here ({', '.join(sorted(STYLES))}); "
            "use --num-shard 1."
        )
    return STYLES[word]


def _part_of(style: Style, name: str, parameter: torch.Tensor, portion: Portion) -> Part | None:
    """Return a rank's part of a parameter; None: all of it."""
    rows = max(0, parameter.dim() - 2)
    if style.along == "outputs":
        part: Part = AxisShare(name, rows, style.packs, style.ragged, portion)
    elif style.along == "inputs" and parameter.dim() > 1:
        part = AxisShare(name, parameter.dim() - 1, style.packs, style.ragged, portion)
    elif style.sums:
        part = Alone(portion)
    else:
        return None
    part.own_shape(parameter.shape)  # refuses what cannot be split
    return part


def _check_heads(config: Any, ranks: int) -> None:
    """Raise ModelLoadError unless every rank can have as many heads as the others."""
    text = config.get_text_config(decoder=True)
    names = (("num_attention_heads", "attention heads"), ("num_key_value_heads", "key-value heads"))
    for name, what in names:
        counts = getattr(text, name, None)
        for count in counts if isinstance(counts, list | tuple) else [counts]:
            if isinstance(count, int):
                even_share(count, what, 0, ranks)


def _without_odd_ties(model: torch.nn.Module, division: Division) -> Division:
    """Return a division in which tied parameters that a plan would cut differently stay whole."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    odd = {
        name
        for tied in names.values()
        if len({_likeness(division.parts.get(name)) for name in tied}) > 1
        for name in tied
    }
    modules = {name.rpartition(".")[0] for name in odd}  # which have biases, too
    parts = division.parts.items()
    return Division(
        {name: part for name, part in parts if name.rpartition(".")[0] not in modules},
        {name: style for name, style in division.styles.items() if name not in modules},
    )


def _likeness(part: Part | None) -> Part | None:
    """Return a part without its name, for comparisons."""
    return replace(part, name="") if isinstance(part, AxisShare) else part
