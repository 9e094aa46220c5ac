"""All known call formats, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterable

from tgi_trio.router.text.tools import formats_gemma as gemma
from tgi_trio.router.text.tools import formats_json as json
from tgi_trio.router.text.tools import formats_python as python
from tgi_trio.router.text.tools import formats_xml as xml
from tgi_trio.router.text.tools.format import Format
from tgi_trio.router.text.tools.formats_harmony import HARMONY
from tgi_trio.router.text.tools.formats_json import HERMES

__all__ = ["FORMATS", "HERMES", "Format", "find_format"]

# The first whose signs are all in the template is used.
FORMATS = (
    HARMONY,
    xml.DSML_V32,
    xml.DSML_V4,
    json.DEEPSEEK_V3,
    json.DEEPSEEK_V31,
    json.KIMI_K2,
    xml.KIMI_K3,
    gemma.GEMMA_4,
    gemma.FUNCTION_GEMMA,
    xml.MINIMAX_M2,
    xml.SEED,
    json.MISTRAL_ID,
    json.MISTRAL_ARGS,
    json.MISTRAL,
    json.GRANITE,
    python.LFM2,
    json.LLAMA_4_JSON,
    python.LLAMA_4,
    python.OLMO_3,
    xml.GLM,
    xml.QWEN_XML,
    json.COHERE,
    json.APERTUS,
    json.NEMOTRON,
    json.HUNYUAN,
    json.PHI_4_MINI,
    json.GIGACHAT,
    HERMES,
    json.LLAMA_3,
)


def find_format(template: str, tokens: Iterable[str] = ()) -> Format:
    """Return the format that a chat template shows; Hermes' if it shows none of these.

    `tokens`: the tokenizer's added tokens, for families whose templates do not show their format.
    """
    known = frozenset(tokens)
    for each in FORMATS:
        if each.fits(template, known):
            return each
    return HERMES
