"""docs/models.md, from the tables of families and the sections of docs/families.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Final

from tgi_trio.model.families.registry import FAMILIES, THROUGH_TRANSFORMERS
from tgi_trio.model.gguf.architectures import ARCHITECTURES
from tgi_trio.model.gguf.block_types import BY_NAME
from tgi_trio.model.gguf.pre_tokenizers import PRE_TOKENIZERS
from tgi_trio.model.gguf.projectors.table import PROJECTORS
from tgi_trio.model.specs.t5 import T5_FAMILIES
from tgi_trio.model.wrappers import TEXT_TYPES
from tgi_trio.settings.records import DTYPES
from tools.docs.backends import render_backends
from tools.docs.families import NAME, link_sections
from tools.docs.formats import render_formats
from tools.docs.markdown import table
from tools.docs.paths import DIVIDED, render_paths
from tools.docs.quantised import render_quantised

_SECTIONS: Final = Path(__file__).parents[2] / "docs" / NAME

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

{paths}## Text of models that read more

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
float32 unless it is asked for. The last column links to what a family has of its
own ([families](families.md)), and to which of their variants run through transformers.

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
| projectors | {projectors} |
| tokenizers | "llama": SentencePiece's BPE; "gemma4": with merges; "gpt2": bytes, cut as {pre} |

Everything else is refused by its name, and so is a damaged file, before a shard starts: scales that
are no numbers, too (`model/scales.py`; all of 256 MiB, of more a part, and all of them again where
they are loaded). For another tokenizer `--tokenizer-name` names the original model's. What each
backend computes with is [above](#formats-and-backends); where that is plain numbers, they are those
of bfloat16 (without `--dtype`) and exactly the file's up to its rounding. Mistral's window is not
in such a file, so sequences see all of themselves, as they do in llama.cpp; nor is the
approximation of GELU, which is that of the family. Baichuan 2's head is normalised, as its
checkpoints' is, whether its file's was or not. Of a model that sees, its file has the text alone:
what sees is in a [second file](#projectors). What no file states is that of the published models:
the chunks of Llama 4, and how it scales queries; the scales of MiniCPM 3, and in older files those
of MiniCPM; the limits of MiniMax-M3's gates; how BitNet activates, which is as in llama.cpp if the
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

### Projectors

The tower of a model that sees is a file of its own, `mmproj-....gguf`. With `--model-id
owner/name:Q4_K_M`, or a folder that has both, it comes with its model: the one in the model's
folder or nearest above it, F16 before BF16 before others. `--mmproj` names another, a file of this
machine or of the repository; beside a single file it has to be named. `--no-mmproj` serves the text
alone. The log says why where one that nobody named cannot be used, and the text is served; one that
is named and does not fit its text, by type or by the length of its features, ends the start.

```bash
python -m tgi_trio --model-id model-Q4_K_M.gguf --mmproj mmproj-F16.gguf
```

Both make the composite model of `transformers` (`model/gguf/projectors/`), and all of
[images](media.md) holds for it: what is in the prompt, prefixes that are shared, counts, videos of
Qwen, GLM and InternVL. The tower's tensors may be of any type above; they are computed as plain
numbers, by torch.

| models | projector | of texts | not in the file, so as published |
|---|---|---|---|
{projected}

Other types are refused by their name. So are those of sounds alone; of one with both, images are
served and the log says that sounds are not. Where a vocabulary lacks the token in whose places
features stand, as most of Gemma 3's do, its last unused one takes its name; a vocabulary without
one is refused. A file with `idefics3` does not say whether it is Idefics 3 or SmolVLM, which see
images alike: videos are served of neither. Images are prepared as `transformers` prepares them, and
not as llama.cpp, whose limits of size are others.

Tokens and logits are those of the whole model in `transformers`, from a text and a projector that
are written as llama.cpp's converter writes them (`tests/shard/gguf/test_projectors.py`). No file of
llama.cpp's own has been tried.
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

# By type of projector: which models have it, and what such a file does not say.
PROJECTED: Final = {
    "gemma3": ("Gemma 3", ""),
    "gemma4v": (
        "Gemma 4",
        "280 tokens of an image at most; that its tokens see each other, in models without "
        "embeddings by layer",
    ),
    "glm4v": ("GLM-4.1V, GLM-4.6V Flash", "12,544 to 9,633,792 pixels"),
    "idefics3": ("Idefics 3, SmolVLM, Granite Docling of 2025", "in older files the longest side"),
    "internvl": ("InternVL 2 to 3.5, Intern-S1", "in older files the number of tiles, 1 to 12"),
    "lfm2": ("LFM2-VL", "tiles of 512 pixels, 2 to 10; 64 to 256 tokens of an image"),
    "llama4": ("Llama 4", "16 tiles at most"),
    "pixtral": ("Pixtral, Mistral Small 3.1 and later", ""),
    "qwen2vl_merger": ("Qwen2-VL", "56 x 56 to 12,845,056 pixels"),
    "qwen2.5vl_merger": ("Qwen2.5-VL", "56 x 56 to 12,845,056 pixels; windows of 112"),
    "qwen3vl_merger": ("Qwen3-VL, Qwen 3.5 and 3.6", "65,536 to 16,777,216 pixels"),
}

# Types that stand in others' `text_config` alone.
INNER = (
    *("deepseek_ocr2_text", "glm4v_moe_text", "glm4v_text", "glm5_next_text", "glm_ocr_text"),
    *("granite4_vision_text", "granite_docling_text", "hunyuan_vl_text", "mistral_large4_text"),
    *("mllama_text_model", "muse_glimmer_text", "paddleocr_vl_text", "qwen2_5_omni_text"),
    *("qwen2_5_vl_text", "qwen2_vl_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text"),
    *("qwen3_vl_text", "step3p5", "unlimited_ocr_text"),
)
IMAGED = ("idefics",)  # types that are tested where their images are
EXACT = ("deepseek_v3", "gpt2", "gpt_oss", "llama", "mistral", "qwen2", "qwen3")


def render() -> str:
    """Return the document."""
    columns = ("family", "path", "tensor parallel", "prefix cache", "drafts", "tested")
    links = link_sections(_SECTIONS.read_text(), FAMILIES)
    rows = ((*row, links.get(row[0].strip("`"), "")) for row in _rows())
    families = table((*columns, "of its own"), rows)
    gguf = _GGUF.format(
        types=", ".join(BY_NAME),
        architectures=", ".join(f"`{name}`" for name in sorted(ARCHITECTURES)),
        projectors=", ".join(f"`{name}`" for name in sorted(PROJECTORS)),
        projected="\n".join(_project()),
        pre=", ".join(f"`{name}`" for name in sorted(PRE_TOKENIZERS)),
    )
    wrappers = ", ".join(f"`{whole}`" for whole, kind in TEXT_TYPES.items() if kind in FAMILIES)
    wrappers = fill(wrappers, 100)
    head = _HEAD.format(dtypes=", ".join(DTYPES), wrappers=wrappers, paths=render_paths())
    stored = render_formats() + render_backends() + render_quantised()
    return head + families + _TESTS + stored + gguf


def _project() -> Iterator[str]:
    """Yield rows of the table of projectors."""
    for name in sorted(PROJECTORS):
        texts = ", ".join(f"`{each}`" for each in sorted(PROJECTORS[name].kinds))
        models, published = PROJECTED[name]
        yield f"| {models} | `{name}` | {texts} | {published} |"


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
