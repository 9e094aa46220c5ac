"""docs/models.md, from the tables of families."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill

from tgi_trio.model.families.registry import FAMILIES, THROUGH_TRANSFORMERS
from tgi_trio.model.gguf.architectures import ARCHITECTURES
from tgi_trio.model.gguf.block_types import BY_NAME
from tgi_trio.model.gguf.pre_tokenizers import PRE_TOKENIZERS
from tgi_trio.model.specs.t5 import T5_FAMILIES
from tgi_trio.model.wrappers import TEXT_TYPES
from tgi_trio.settings.records import DTYPES
from tools.docs.backends import render_backends
from tools.docs.formats import render_formats
from tools.docs.markdown import table
from tools.docs.paths import DIVIDED, render_paths
from tools.docs.quantised import render_quantised

_HEAD = """# Models

Whether a model is served depends on two things in its folder:

- **its type**, `model_type` in config.json: [the families](#the-families) lists those that are
  computed here, and others that `transformers` knows are [tried](#types-that-are-not-listed);
- **its weights**: safetensors (one file, or several with an index) in float32, bfloat16, float16
  or float64 (read as float32), one of the [quantised formats](#quantised-weights), or
  [GGUF](#gguf).

Everything else is refused at the start, by its name. So are tensors that the model would leave
unread, unless they are known to be harmless (`model/leftovers.py`). This page is generated from the
code by `python -m tools.docs --write`.

<!-- generated: contents -->
<!-- end -->

{paths}## What few families have

DeepSeek's keys and values are kept compressed: one vector per token and layer, for all heads
(`torch_backend/layers/latent.py`). On a GPU a kernel of its own attends to it; the CPU kernels
have operations of its own around their attention ([latents](cpu-backend/attention.md#latents)).

Layers may differ in what they keep of a token (Gemma 3n and 4, MiMo-V2-Flash): in the width and
number of their heads, values may be narrower than keys, and the last layers may keep nothing and
read what one before them has written. A block of K and V is of all layers, each with a part of its
size (`torch_backend/kv_cache.py`). Laguna's layers differ in the number of query heads, too. The
CPU kernels serve all of them; on a GPU those of our own do, up to heads of 512 numbers, and torch
serves larger ones without recorded graphs. Gemma 3n's first layers cut gates at a bound that all
gates of an MLP set together: such models are not split over ranks.

DeepSeek V3.2 and GLM 5 attend to those tokens alone that an index scores best
(`torch_backend/attention/indexed.py`): its keys lie behind the latents in the cache, in pages as
they do. On a GPU kernels of our own score, choose and attend, in recorded graphs
(`torch_backend/attention/paged_indexed.py`); the CPU kernels have operations of their own for it
([index](cpu-backend/attention.md#an-index-of-tokens)), those of the next families included that
choose tokens one by one. The index is computed in the model's dtype, as `transformers` does, not in
8 bits behind a Hadamard transform. Hunyuan 4 is computed so as well, with its sinks, gates of
values, limits of routed experts and several hidden states; without limits it runs through
transformers.

DeepSeek V4's heads all attend to one key per token, which is its value as well, in a window, and to
*entries*, means of runs of 4 or 128 tokens; of the former an index selects those that a token
attends to (`torch_backend/attention/compressed.py`). What entries are made of is kept by token in
the pages, behind its key, and an entry takes the place of numbers of its last token: prefixes,
wrong drafts and preempted sequences need nothing of their own, for six times the memory of the
keys alone in layers with an index, three times in the others. An 8-bit cache is refused. A token
has several hidden states, of which attention and experts read a sum (hyper-connections,
`layers/hyper.py`; Hunyuan 4 has them without a mixture); in the first layers its experts are those
of a table, by its id. On a GPU our kernels compute it, [recorded](device/indices.md#entries). The
names of published files (`model/published_names.py`) are read like those that `save_pretrained`
writes. Other scores of experts than the published ones, biases in the shared expert and rotation by
length run through transformers.

A.X-K2's norms before attention and experts have gates of low rank behind them, which their own
result opens (`layers/norm_gate.py`), and its queries and gates of values are expanded from
compressed queries with and without their norm.

Mistral Large 4's index reads what its layer reads, not compressed queries. Queries of either are
scaled by the logarithm of their position, each head by numbers of its own
(`layers/log_scale.py`), frequencies have learned factors, and some layers do not turn; their heads
have as many dimensions more from the latent. A layer may read another's latents; the key of its own
index lies behind these, in the same row of the cache; so it is not cut into stages. `mtp_dspark` is
left unread. With experts in groups, or where `kv_source_layers` names other latents than
transformers would read, it runs through transformers.

GLM 5.3 Flash (`glm5_next`) has delta rules, whose decays have a bound, and layers with an index
that chooses whole runs of tokens (`torch_backend/attention/chosen_runs.py`), between several hidden
states as DeepSeek V4. What the mean of a run is made of lies behind the latents by token. Torch
makes the means again in every step; kernels make each once, in the place of its last token's key,
and choose and attend as for DeepSeek V3.2; so do the [CPU
kernels](cpu-backend/attention.md#an-index-of-blocks), but for K and V of 8 bits. An index that may
leave out the tokens behind the last whole run is served through transformers.

Ling 3 (`bailing_hybrid`) has delta rules as well, whose decays by channel have a bound, and every
sixth layer attends to latents, with gates of heads. Compressed queries run through transformers.

Families that `transformers` has not are Llama, Granite, GLM or a mixture of others by names of
their own (`model/families/own_names.py`), and their code is not run: InternLM 1, 2 and 2.5,
openPangu Embedded, XVERSE, Orion, Aquila, MiniCPM 1, 2, 4 and 4.1, ChatGLM 2 and 3 with GLM-4 9B
and CodeGeeX 4 (`chatglm`), DeepSeekMoE 16B (`deepseek`), Ling and Ring 1 and 2 (`bailing_moe`, told
apart by `architectures`) and Kimi K2. MiniCPM 4 attends to every token; where its config.json has a
`sparse_config` (InfLLM-v2), sequences end before the length from which its attention would be
sparse, and the start says so. LongRoPE turns it as its own code does, with one set of divisors at
every length. Refused are the first ChatGLM, whose prompts see themselves as a whole, ChatGLM 2 with
32,768 tokens, which no file tells from version 3, XVERSE's mixture, MiniCPM-SALA, and Ling 1 with
biases or a normalised head. Tokenizers that are files of tiktoken's and code (Kimi, GLM-4 9B) are
read without that code (`router/text/ranked_files.py`), and so are files of SentencePiece's with
code (`router/text/piece_files.py`: InternLM 1 and 2, Orion, Baichuan, openPangu, ChatGLM 2 and 3).
A template of chats that is in that code alone (InternLM 1, Baichuan, ChatGLM 2) has to be given
with `--chat-template`, and ChatGLM's roles are tokens where tokenizer_config.json numbers them.

MiniMax-M3's layers attend to blocks of tokens, which an index of another kind chooses, for each KV
head its own (`torch_backend/attention/chosen_blocks.py`): a block is as good as its best token, and
the last blocks are always among them. Index keys are layers of the KV cache of their own. On a GPU
kernels choose and attend, in recorded steps (`attention/paged_blocks.py`); the CPU kernels have
operations for it ([blocks](cpu-backend/attention.md#an-index-of-blocks)). Gates other than
gpt-oss', an index that has not as many heads as there are KV heads, or one that is to choose more
of the last blocks than of all, run through transformers.

Qwen 4 chooses blocks for all heads alike, by one index key of each whole block, which takes the
place of its last token's in such a layer of the cache (`torch_backend/attention/pooled_blocks.py`).
It turns as the block's first token does, whose three positions are kept in the cache as well. Every
token has several hidden states, which gates mix before each part of a layer
(`layers/gated_streams.py`), and some layers add embeddings of n-grams, with tables that ranks
divide by columns (`torch_backend/states/ngrams_layer.py`); the last tokens are part of the state.
Hashes that a checkpoint states have to be those that config.json gives. On a GPU kernels choose and
attend, in recorded steps (`attention/paged_pooled.py`); it is not cut into stages. The CPU kernels
have operations for all of it ([blocks](cpu-backend/attention.md#an-index-of-blocks)). With rotary
scaling by length, or activations other than SiLU, it runs through transformers.

Layers that keep a state per sequence (short convolutions, delta rules, Mamba of both kinds, RG-LRU:
`torch_backend/states/`) stand in the place of attention, beside it (Falcon H1), or alone: Mamba,
Mamba 2 and Falcon Mamba keep no K and V at all, so that their memory is all slots. The CPU kernels
compute all of them; on a GPU [kernels of our own](device/kernels.md) do, prompts and decodes, in
recorded steps, but for states that are too large for them and prompts through n-grams, which torch
computes. Ranks divide channels and heads; where a Mamba-2 has fewer groups of heads than there are
ranks, neighbours share one, and its norm is over what all of them read.
Recurrences are float32; what layers add up has the model's dtype, where `transformers` keeps
Mamba's in float32 (`residual_in_fp32`). Falcon H1 with biases behind what it scales, and Nemotron 3
with biases around compressed experts, run through transformers.

Zamba2's blocks of attention and MLP (`model/matrices/shared_block.py`, `layers/shared_block.py`)
are used by many layers, each with changes of low rank; they read the embedding beside the hidden
state, and what they say joins what the layer's Mamba reads. A block's weights are held once. It is
not cut into stages, and adapters are merged. Steps of time are bounded in prompts and decodes
alike, where `transformers` bounds them in prompts alone.

gpt-oss is computed with its sinks, windows, limited gates and biases; its experts' one tensor for
all is read as one for each (`model/stacked_experts.py`). Another `swiglu_alpha` than 1.702 runs
through transformers.

llama.cpp says the same of its files, to 0.1 % of the logits' size (median over tokens, float32
weights), but for two things: a token for which two experts are nearly equal may get the other one
(in a model of random weights 55 % at one token of 60, 7 % over all), and it rounds the bounds of
YaRN, which OpenAI's model does not (`truncate` is false), so that its long positions are others.

Llama 4's layers see chunks of positions, or everything without turning by it, their queries scaled
by their position instead; what a token's experts weigh multiplies what goes into them. Kernels
compute both, on a CPU and on a GPU, there in recorded graphs.

Mixtures most of whose layers have a window (`model/families/windowed.py`) turn by position in those
alone. Laguna runs through transformers with gates of a kind that it does not name. Command A+ runs
through transformers if it joins shared experts neither as their average nor as their sum with
others, or chooses experts by neither softmax nor sigmoid.

The text of Step 3.7 Flash is the type `step3p5` (`model/families/step.py`): layers with a window
have more query heads, and activated gates of the last layers' experts are bounded. With bounds in
dense layers, biases of MLPs, or gates other than one per head, it runs through transformers; so
does the type by itself, whose code comes with it.

LongCat-Flash's layers have two attentions and two MLPs each, and are two layers here
(`model/families/longcat.py`); what their experts say, some of whom return their input, joins behind
the second. Torch computes it, on a GPU in recorded graphs, and it is not cut into stages. With a
bias of the router, it runs through transformers.

Llama 3.2 Vision and Idefics 1 have layers that attend to images
(`model/matrices/cross_attention.py`, `torch_backend/layers/cross_attention.py`), whose keys and
values are the
[tower's](media.md#which-models) to make. Llama's are passed by in text, and by rows of text beside
others; of Idefics' the MLP alone adds something there. Eight tokens behind Llama's vocabulary are
read, an image's among them, and never chosen; Idefics' last ones have tables of their own. Torch
computes both.

Command R+ and StableLM 2 12B have norms of query and key heads, each with weights of its own; ranks
divide these as they do heads.

BitNet normalises what the last linears of attention and MLP read, over all heads and all columns:
ranks gather these (`torch_backend/layers/norm.py`). The CPU kernels do so before they round it.

The first GPT and OPT 350M normalise sums, not what their parts read of them; the norm of the last
sum stands for other models' final one. OPT 350M's embeddings are narrower than its layers, with a
linear before these and one behind; OPT without a final norm, or without weights in its norms, runs
through transformers. XGLM's positions are computed (`shard/positions/sines.py`). XGLM with
cross-attention, or with padding of a number that its positions have, runs through transformers, and
IQuest Coder with windows or clipped queries, which transformers refuses.

## Text of models that read more

Models that read more than text are served as what writes their text (`model/wrappers.py`):
`text_config` says which family that is, and its weights are found under the names of all versions
of such checkpoints. It is one of the families below in
{wrappers}, where
the text's type is one of them; any other type that `transformers` lists as of images and text is
loaded whole by it, and its text is tried in the same ways. Positions of three parts are one for
text. What a text's family does to logits (Cohere's `logit_scale`, Granite's `logits_scaling`,
Gemma's `final_logit_softcapping`) is done here as well, where newer classes of `transformers` leave
it out (`aya_vision`, `cohere2_vision`, `gemma3`, `llava_next`): the likeliest token is the same,
and probabilities are those of the text.

## The families

Every path has {dtypes} (`--dtype`); a CPU computes float16 in
float32 unless it is asked for.

"""

_GGUF = """
## GGUF

`--model-id file.gguf` serves a file of llama.cpp, a folder that has one, or the parts of a split
one (`-00001-of-00003.gguf`); `--model-id owner/name:Q4_K_M` downloads that file of a repository
alone, or its parts. Config, tokenizer and chat template come from its metadata (`model/gguf/`): no
other file is needed. What they say is written into a model folder in
`$XDG_CACHE_HOME/tgi_trio/gguf` (or `~/.cache/tgi_trio/gguf`), with links to the weights.

| | |
|---|---|
| types of tensors | {types} |
| architectures | {architectures} |
| tokenizers | "llama": SentencePiece's BPE; "gemma4": with merges; "gpt2": bytes, cut as {pre} |

Everything else is refused by its name, and so is a damaged file, before a shard starts: scales that
are no numbers, too (`model/scales.py`; all of 256 MiB, of more a part, and all of them again where
they are loaded). For another tokenizer `--tokenizer-name` names the original model's. What each
backend computes with is [above](#formats-and-backends); where that is plain numbers, they are those
of bfloat16 (without `--dtype`) and exactly the file's up to its rounding. Mistral's window is not
in such a file, so sequences see all of themselves, as they do in llama.cpp; nor is the
approximation of GELU, which is that of the family. Baichuan 2's head is normalised, as its
checkpoints' is, whether its file's was or not. Of a model that sees, its file has the text alone
(`qwen2vl`, `qwen3vl`, `qwen35`, `gemma4`, `mistral3`, `llama4`, `step35`, `muse-glimmer`,
`glm5-next`), so it is shown no images. What no file states is that of the published models: the
chunks of Llama 4, and how it scales queries; the scales of MiniCPM 3, and in older files those of
MiniCPM; the limits of MiniMax-M3's gates; how BitNet activates, which is as in llama.cpp if the
vocabulary is Llama's, and as in Microsoft's model of 2 B weights if it is Llama 3's. Its files in
bitnet.cpp's own type, I2_S, are refused by name: their order differs between the machines that
write them, and nothing in them tells which. Layers that draft further tokens
[draft](speculation.md#layers-of-the-models-own) where llama.cpp keeps their names (GLM, DeepSeek
V3.2, Hunyuan 3), and are left unread in Qwen 3.5's and in other families. Qwen 3.5's value heads
lie in another order than in its checkpoints, and are computed in it: ranks hold the last matrix of
its delta rules as plain numbers. Queries, keys and values in one tensor (`--fuse-qkv`), and gates
and ups of experts in one, are read in files of any architecture.

Some models have no architecture of their own: Solar Open is `glm4moe`, Youtu and GLM-4.7-Flash are
`deepseek2`, InternLM 3 and IQuest Coder `llama`, Bamba `granitehybrid`. Others have no family here
and are read as one that computes the same: InternLM 2, XVERSE, EXAONE 3 and Pangu as Llama, MiniCPM
as Granite, Orion as StableLM, Maincoder as Hunyuan, Ling 1 as Granite's mixtures, Ling 2 as
GLM-4.5. Files of any other architecture are refused by its name, also where the family is served
from safetensors: so are Qwen 4 (`qwen4exp`), Hunyuan 4 (`hy_v4`, whose pairs llama.cpp turns as
neighbours, and `transformers` half a head apart) and T5. llama.cpp has no architecture for OLMo
hybrid, RecurrentGemma, LFM3, Zamba2, LongCat-Flash, OPT and other families.

Dequantised blocks are compared with llama.cpp's reference bit for bit
(`tests/shard/checkpoint/test_gguf.py`), a file that llama.cpp made with `transformers` on its
dequantised weights, and a small random model of each architecture, written as GGUF, with the
folder it was written from (`tests/shard/gguf`).
"""

_TESTS = """
How they are tested, each on a tiny checkpoint with seeded random weights, in float32 against
`transformers`:

- *exactness*: `tests/shard/torch_backend/test_models_exact.py`. Greedy tokens equal and logits
  within 1e-4 alone, in a batch, in chunks among decodes, over shuffled blocks, behind a shared
  prefix, replayed, preempted and resumed, repeated, with right and wrong drafts; prompt
  log-probabilities; bfloat16 near float32; the whole server in `tests/system/test_exactness.py`.
- *families*: `tests/shard/torch_backend/test_models_families.py`. Tokens and logits of prompts in
  chunks among decodes over shuffled blocks, and the variants of a family that its config.json
  allows. Newer families of attention alone in `test_newer_families.py` beside it: sixteen at once
  in steps of any size, some computed twice, with drafts, behind a cached prefix, pushed out and
  resumed. Through transformers: `test_through_transformers.py`, likewise. Families that it has
  not, in `test_own_names.py`: as a relative that it has, with the same numbers by their names.
- *ranks*: `tests/shard/ranks/test_ranks.py`. Split over two ranks, tokens and logits as above;
  over four, with fewer KV heads than ranks.
- *wrappers*: `tests/shard/torch_backend/test_wrappers.py`. As *families*, inside the checkpoints
  that they come in, and the names and omissions of other versions of these.
- *images*: `tests/shard/media`. Beside prompts with images, alone and in chunks.
- *encoder-decoder*: `tests/shard/torch_backend/test_encoder_decoder.py`. As *exactness*, with
  penalties and seeds; ours on one rank and on two.
"""

# Types that stand in others' `text_config` alone.
INNER = (
    *("glm4v_moe_text", "glm4v_text", "glm5_next_text", "glm_ocr_text", "mllama_text_model"),
    *(
        "granite4_vision_text",
        "mistral_large4_text",
        "muse_glimmer_text",
        "paddleocr_vl_text",
        "step3p5",
    ),
    *("qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text"),
    *("qwen2_5_omni_text", "qwen3_omni_moe_text"),
)
IMAGED = ("idefics",)  # types that are tested where their images are
EXACT = ("deepseek_v3", "gpt2", "gpt_oss", "llama", "mistral", "qwen2", "qwen3")


def render() -> str:
    """Return the document."""
    families = table(
        ("family", "path", "tensor parallel", "prefix cache", "drafts", "tested"), _rows()
    )
    gguf = _GGUF.format(
        types=", ".join(BY_NAME),
        architectures=", ".join(f"`{name}`" for name in sorted(ARCHITECTURES)),
        pre=", ".join(f"`{name}`" for name in sorted(PRE_TOKENIZERS)),
    )
    wrappers = ", ".join(f"`{whole}`" for whole, kind in TEXT_TYPES.items() if kind in FAMILIES)
    wrappers = fill(wrappers, 100)
    head = _HEAD.format(dtypes=", ".join(DTYPES), wrappers=wrappers, paths=render_paths())
    stored = render_formats() + render_backends() + render_quantised()
    return head + families + _TESTS + stored + gguf


def _rows() -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yield (family, path, tensor parallel, prefix cache, drafts, tested)."""
    for family in sorted(FAMILIES, key=str.lower):
        tested = "exactness, families, ranks" if family in EXACT else "families, ranks"
        if family in INNER:
            tested = "wrappers"
        if family in IMAGED:
            tested = "images"
        reuse = "yes, unless its rotary scaling is by length"
        yield f"`{family}`", "decoder", "yes", reuse, "yes", tested
    for family in sorted(T5_FAMILIES):
        yield f"`{family}`", "encoder-decoder", "yes", "no", "no", "encoder-decoder"
    for family, way in sorted(THROUGH_TRANSFORMERS.items()):
        reuse = "no" if way in ("cached", "encoder-decoder") else "yes"
        tested = "encoder-decoder" if way == "encoder-decoder" else "families"
        divided = "by its plan" if family in DIVIDED else "no"
        tested += ", ranks" if family in DIVIDED else ""
        yield f"`{family}`", f"transformers, {way}", divided, reuse, "no", tested
