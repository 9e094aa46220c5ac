"""Readers of flags' and variables' texts, by kind of value.

A reader raises ValueError with what is allowed, as the end of a sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf, nan
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tgi_trio.errors import ConfigurationError
from tgi_trio.log_levels import parse_log_levels
from tgi_trio.router.media.policy import parse_policy
from tgi_trio.settings.keys import check_key
from tgi_trio.settings.records import (
    ACTIVATIONS,
    ADAPTER_TOKENIZERS,
    CPU_BACKENDS,
    DRAFTERS,
    DTYPES,
    KV_CACHE_DTYPES,
    LARGEST_ROPE_FACTOR,
    OLDER_CPU_BACKENDS,
    QUANTIZATIONS,
    ROPE_SCALINGS,
)

_LARGEST: Final = 2**63 - 1  # of whole numbers: shards get them in 64 bits
_SHOWN: Final = 200  # most characters of a value in its error
_DIGITS: Final = 30  # enough for all of these; more are not read
_TRUE: Final = frozenset(("true", "1", "yes", "y", "on", "t"))
_FALSE: Final = frozenset(("false", "0", "no", "n", "off", "f"))
BOOLEANS: Final = _TRUE | _FALSE
_NONE: Final[Mapping[str, str]] = MappingProxyType({})
EXTENSIONS: Final = (".safetensors", ".bin", ".pt")  # of weights for `download-weights`
WEIGHT_FORMATS: Final = ("gptq", "gguf:q4_0", "gguf:q8_0")  # for `quantize`
SHELLS: Final = ("bash", "zsh", "fish")  # for `completion`


def read_bool(text: str) -> bool:
    """Return a truth value, in any of the usual words and any case."""
    word = text.lower()
    if word not in BOOLEANS:
        raise ValueError("expected true or false")
    return word in _TRUE


def _one_of(words: Sequence[str], older: Mapping[str, str] = _NONE) -> Callable[[str], str]:
    """Return a reader that accepts only these words; `older`: what others meant once."""

    def read(text: str) -> str:
        text = older.get(text, text)
        if text not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return text

    return read


def _bits(text: str) -> int:
    return int(_one_of([str(bits) for bits in ACTIVATIONS])(text))


def _int(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise ValueError("expected a whole number")
    if len(text) > _DIGITS or abs(value := int(text)) > _LARGEST:
        raise ValueError(f"expected a whole number of {_LARGEST} at most")
    return value


def _number(least: float = -inf, most: float = inf) -> Callable[[str], float]:
    """Return a reader of numbers within bounds."""
    bounds = f" from {least} to {most}" if most < inf else f" of at least {least}"
    expected = f"expected a number{bounds if least > -inf else ''}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not (abs(value) < inf and least <= value <= most):
            raise ValueError(expected)
        return value

    return read


def _unicode(text: str) -> str:
    """Return `text`; what was not UTF-8 could not be written into any answer."""
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("expected UTF-8")
    return text


def _text(text: str) -> str:
    if not text:
        raise ValueError("expected a text that is not empty")
    return _unicode(text)


def _model(text: str) -> str:
    if not text:
        raise ValueError("expected a hub repository or a local folder")
    return _unicode(text)


def _origin(text: str) -> str:
    if not re.fullmatch(r"[!-~]+", text):
        raise ValueError(
            "expected an origin as browsers send it, such as https://example.org (other letters "
            "of a name as xn--...), or *"
        )
    return text


def _replicas(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    bounds = [part for part in (low, high if colon else low) if part.isdecimal()]
    if len(bounds) != 2 or not 1 <= int(bounds[0]) <= int(bounds[1]):
        raise ValueError("expected a number such as 2, or two such as 2:8, the lower one first")
    return int(bounds[0]), int(bounds[1])


def _path(text: str) -> Path:
    if not text:
        raise ValueError("expected a path")
    return Path(text)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    named = bool(host) and (":" not in host or (host[0] == "[" and host[-1] == "]"))
    is_port = port.isascii() and port.isdecimal() and int(port) <= 65535
    if text == "unix:" or not (text.startswith("unix:") or (named and is_port)):
        raise ValueError("expected host:port, [host]:port or unix:/path")
    return text


def _shard(text: str) -> str:
    address = text.removeprefix("tcp://")
    try:
        if address == text or address.startswith("unix:"):
            raise ValueError
        _address(address)
    except ValueError:
        raise ValueError("expected tcp://host:port or tcp://[host]:port") from None
    return text


def _url(text: str) -> str:
    from tgi_trio.client.address import parse_address  # imports trio, which --help does not need

    parse_address(text)
    return text


def _route(text: str) -> str:
    if not re.fullmatch(r"/[!-~]*", text) or re.search("[<>?#]", text):
        raise ValueError("expected a path such as /predict")
    return text


def _collector(text: str) -> str:
    found = re.fullmatch(r"https?://[^/@\s]+:([0-9]+)/?", text)
    if found is None or not 0 < int(found[1]) < 2**16:
        raise ValueError("expected http://host:port, or https:")
    return text


def _quantization(text: str) -> str:
    if text not in QUANTIZATIONS:
        raise ValueError(
            f"expected one of {', '.join(QUANTIZATIONS)}: eetq makes 8-bit weights of an ordinary "
            "checkpoint, q4_k or bitsandbytes-nf4 4-bit ones; gptq, awq and others say what it is"
        )
    return text


def _sizes(text: str) -> tuple[int, ...]:
    """Return sizes; as in TGI, those of zero and less are dropped, so that 0 alone means none."""
    parts = [part.strip() for part in text.split(",")]
    try:
        return tuple(size for part in parts if (size := _int(part)) > 0)
    except ValueError:
        raise ValueError("expected sizes such as 1,2,4,8, or 0 for none") from None


def _adapters(text: str) -> tuple[str, ...]:
    """Return entries; as in TGI, spaces are ignored, with at most one `=` and one `@` in each."""
    entries = tuple("".join(entry.split()) for entry in text.split(","))
    for entry in entries:
        name = entry.partition("=")[0].partition("@")[0]
        if entry.count("=") > 1 or entry.count("@") > 1 or not name or entry[-1] in "=@":
            raise ValueError(f"Invalid LoRA adapter format: {entry}")
    return entries


def _image_urls(text: str) -> str:
    try:
        parse_policy(text)
    except ConfigurationError as error:
        raise ValueError(f"expected none, public, hosts, networks or ports: {error}") from None
    return text


def _levels(text: str) -> str:
    parse_log_levels(text)
    return text


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def _reasoning(text: str) -> str:
    from tgi_trio.router.text.thoughts.derive import ThoughtSettings  # --help needs no templates

    try:
        ThoughtSettings.parse(text)
    except ValueError as error:
        raise ValueError(f"expected {error}") from None
    return text


def _usage_stats(text: str) -> str:
    word = text.lower()
    if word not in ("on", "off", "no-stack"):
        raise ValueError("expected on, off or no-stack")
    return word


# kind -> (placeholder in --help, reader)
KINDS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "switch": ("", read_bool),  # given or not; a value may follow
    "toggle": ("", read_bool),  # the same, with a --no- form, for defaults of true
    "bool": ("BOOL", read_bool),
    "int": ("N", _int),
    "tokens": ("TOKENS", _int),
    "bytes": ("BYTES", _int),
    "us": ("US", _int),
    "seconds": ("SECONDS", _number()),
    "number": ("NUMBER", _number()),
    "share": ("SHARE", _number(0, 1)),
    "ratio": ("RATIO", _number(0)),
    "replicas": ("LOW:HIGH", _replicas),
    "factor": ("FACTOR", _number(1, LARGEST_ROPE_FACTOR)),
    "text": ("TEXT", _text),
    "origin": ("TEXT", _origin),
    "model": ("MODEL", _model),
    "path": ("PATH", _path),
    "dtype": ("DTYPE", _one_of(DTYPES)),
    "quantization": ("FORMAT", _quantization),
    "kv_dtype": ("DTYPE", _one_of(KV_CACHE_DTYPES)),
    "weights": ("FORMAT", _one_of(WEIGHT_FORMATS)),
    "rope": ("KIND", _one_of(ROPE_SCALINGS)),
    "adapters": ("IDS", _adapters),
    "image_urls": ("URLS", _image_urls),
    "backend": ("BACKEND", _one_of(CPU_BACKENDS, OLDER_CPU_BACKENDS)),
    "whose": ("WHOSE", _one_of(ADAPTER_TOKENIZERS)),
    "drafter": ("DRAFTER", _one_of(DRAFTERS)),
    "bits": ("BITS", _bits),
    "sizes": ("SIZES", _sizes),
    "ip": ("IP", _text),
    "key": ("KEY", check_key),
    "url": ("URL", _url),
    "address": ("ADDRESS", _address),
    "shard": ("ADDRESS", _shard),
    "route": ("PATH", _route),
    "collector": ("URL", _collector),
    "object": ("JSON", _object),
    "reasoning": ("MARKS", _reasoning),
    "levels": ("LEVEL", _levels),
    "shell": ("SHELL", _one_of(SHELLS)),
    "extension": ("EXT", _one_of(EXTENSIONS)),
    "usage-stats": ("WHEN", _usage_stats),
}
SECRET: Final = frozenset(("key",))  # never stripped, split or shown


def read_value(kind: str, source: str, text: str) -> Any:
    """Return the value of `text` from `source`, a flag or a variable.

    Raises ValueError with a whole sentence, which does not contain secrets.
    """
    secret = kind in SECRET
    try:
        return KINDS[kind][1](text if secret else text.strip())
    except ValueError as error:
        if secret:
            raise ValueError(f"{source}: {error}") from None
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise ValueError(f"{source}: {error}, got {shown!r}") from None
