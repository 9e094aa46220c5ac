"""Sections of docs/models.md: which code computes a model, and what of it over ranks."""

from __future__ import annotations

from textwrap import fill
from typing import Final

# Models of transformers that ranks divide, as `tests/shard/ranks/transformers_support.py` has them.
DIVIDED: Final = ("apertus1p5_text", "aria", "aria_text", "beam", "codegen")

_PATHS: Final = """## Paths

| path | what it is |
|---|---|
| decoder | our generic decoder: a small spec per family, paged memory, one forward for all rows |
| encoder-decoder | our T5 on the same memory; the encoder runs when the prompt's end is reached |
| transformers, paged | the model of `transformers` with our paged attention in it |
| transformers, cached | the model of `transformers`, row by row, each with a cache of its own |
| transformers, recompute | the same without a cache, every token from the first: slow, but right |
| transformers, encoder-decoder | an encoder-decoder of `transformers`, row by row |

The log of a start names the path and the backend of its model. It says whether the model has the
CPU kernels, the prefix cache, drafts and ranks, and if not, why; and it warns where `--speculate`
or the prefix cache have no effect. `settings.serving` of `/info` says the same.

Three rules for all paths:

- Code that comes with a checkpoint is run with `--trust-remote-code` alone, and never for a family
  of the first two paths.
- A head that config.json ties to the embedding is tied, unless the checkpoint has a head with other
  values: that one is used, with a warning, as in `transformers`.
- Rotary scaling is read from `rope_parameters` and from the older `rope_scaling`, which wins where
  both are there. `--rope-scaling` and `--rope-factor` replace it.

## Types that are not listed

A type that is not listed, and that `transformers` knows or whose code comes with the model, gets
the first `transformers` path that proves right. At load the logits of each path are compared with
those of a plain forward pass over the whole sequence; the log names the path that was taken.

They are compared on a *twin* of the model (`twin.py`): the same code and kinds of layers, but
narrow, with random weights, and with windows and scan chunks shorter than the sequences. The twin
computes in float32, since in bfloat16 a wrong path could hide behind rounding. This takes seconds
and tens of MB. Where no twin can be built, recompute is taken.

A type is refused if plain passes over the tokens so far do not generate with it. Either its tokens
see those that follow them (XLNet, and encoders such as BERT unless config.json says `is_decoder`),
or `generate` of `transformers` feeds it in a way of its own (XLM). Types that are known for it
(`model/unserved_types.py`) are refused before a shard is there, any other at load.

## Through transformers over ranks

Ranks (`--num-shard`) divide a model that runs through `transformers` if `transformers` has a plan
for its type (`base_model_tp_plan` of its configuration, which code that comes with a model may have
as well), and if our paged attention stands in the place of its own. Each rank reads and holds its
part of the weights, and the keys and values of its heads; the log says what share of the weights
that is. What the plan does not name is whole on every rank: norms and routers, and in some types
attention, with all of its keys and values.

No plan is believed: each rank divides a twin as it has divided the model, and together they must
compute what the whole twin computes (`fallback/proving.py`). Refused at load, with the reason, are

- types without a plan, or with one for embeddings alone (`jetmoe`, `diffllama`);
- plans that are wrong (`doge`), or have styles that are not known here;
- numbers that the ranks do not divide, such as that of KV heads;
- models that run row by row (`minimax`), and encoder-decoders;
- the stages of a pipeline (`--pipeline-stages`).

(`tests/shard/ranks/test_transformers_ranks.py`:
{divided}, and `olmoe`
with clipped queries, which its family declines.) No device has computed such parts yet.

"""


def render_paths() -> str:
    """Return the sections."""
    return _PATHS.format(divided=fill(", ".join(f"`{name}`" for name in DIVIDED), 100))
