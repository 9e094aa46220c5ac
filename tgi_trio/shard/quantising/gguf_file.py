"""Writes a model as a GGUF file, with matrices rounded to blocks of 32."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from tokenizers import Tokenizer

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.gguf.architectures import ARCHITECTURES
from tgi_trio.model.gguf.block_types import SERVED
from tgi_trio.model.gguf.header import MAGIC
from tgi_trio.model.gguf.tokenizer import Vocabulary, make_tokenizer
from tgi_trio.model.gguf.written import (
    find_architecture,
    model_metadata,
    name_tensors,
    rotary_divisors,
    vocabularies,
)
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.tensors import decoder_claims, decoder_matrices
from tgi_trio.shard.checkpoint.lookup import Checkpoint, open_checkpoint
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32
from tgi_trio.shard.checkpoint.rounding.gguf_types import ENCODERS
from tgi_trio.shard.quantising.job import Progress

FILE_TYPES: Final = {"Q4_0": 2, "Q8_0": 7}  # `general.file_type`
_NUMBERS: Final = {kind.name: (number, kind) for number, kind in SERVED.items()}
_ALIGNMENT: Final = 32
_ROWS: Final = 1 << 20  # weights that are rounded at once
# A text that tells tokenizers apart: digits, spaces, contractions, scripts, punctuation.
_PROBE: Final = (
    "It's 12345 o'clock,  isn't IT?\n\n\tÜber-große Zahl: 3.14159e-10 (naïve)…\r\n"
    "def f(x):\n    return x['a'] + 42 # 日本語のテキスト и русский\n   I'LL we've DON'T  "
)


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Floats]

    @property
    def size(self) -> int:
        kind = _NUMBERS[self.kind][1]
        return int(np.prod(self.shape)) // kind.weights * kind.bytes


def write_gguf(
    config: ModelConfig, spec: DecoderSpec, output: Path, kind: str, progress: Progress, text: str
) -> None:
    """Write `output`, atomically, and the folder it is in. `kind`: Q4_0 or Q8_0.

    `text`: for testing the tokenizer. Raises ConfigurationError for a model that cannot be written,
    or if the file exists.
    """
    if output.exists():
        raise ConfigurationError(f"{output} is there already: name another file.")
    architecture = find_architecture(config, spec)
    metadata = model_metadata(config, spec, architecture)
    metadata |= {"general.file_type": FILE_TYPES[kind], "general.quantization_version": 2}
    metadata |= _tokenizer_metadata(config, text)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f"{output.name}.part")
    with (
        open_checkpoint(config, spec.names.base) as checkpoint,
        unfinished.open("wb") as file,
    ):
        tensors = list(_tensors(spec, checkpoint, architecture, kind))
        _write_header(file, metadata, tensors)
        for tensor in progress(tensors):
            _write_tensor(file, tensor)
    unfinished.rename(output)


def _tensors(
    spec: DecoderSpec, checkpoint: Checkpoint, architecture: str, kind: str
) -> Iterator[_Tensor]:
    names, matrices = name_tensors(spec), {m.name: m for m in decoder_matrices(spec)}
    claims = decoder_claims(spec)
    heads = {"attn_q": spec.heads, "attn_k": spec.kv_heads}
    for own, shape in claims.needed.items():
        module, _, ending = own.rpartition(".")
        if module not in names:
            raise ConfigurationError(f"Tensor {own!r} has no name in GGUF.")
        name = f"{names[module]}.{ending}"
        turned = (
            heads.get(name.split(".")[-2]) if ARCHITECTURES[architecture].side_by_side else None
        )
        read = _reader(checkpoint, matrices.get(own), own, shape, turned)
        yield _Tensor(name, shape, _kind(name, shape, kind), read)
    if (divisors := rotary_divisors(spec)) is not None:
        table = np.array(divisors, np.float32)
        yield _Tensor("rope_freqs.weight", table.shape, "F32", lambda: table)


def _kind(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Return a tensor's type; embedding and head have at least 8 bits."""
    if len(shape) == 1:
        return "F32"
    if shape[-1] % 32:
        return "F16"
    return "Q8_0" if name in ("token_embd.weight", "output.weight") else kind


def _reader(
    checkpoint: Checkpoint,
    matrix: MatrixRef | None,
    name: str,
    shape: tuple[int, ...],
    heads: int | None,
) -> Callable[[], Floats]:
    """Return a function that reads a tensor; `heads`: whose rotary pairs are made neighbours."""

    def read() -> Floats:
        if matrix is None:
            values = checkpoint.vector(name, shape[0])
        else:
            stored = checkpoint.matrix(name, (matrix.rows, matrix.columns))
            values = to_float32(stored.dequantised())
        if not np.isfinite(values).all():
            raise ModelLoadError(f"Tensor {name!r} holds a weight that is no number.")
        if heads is None:
            return values
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        turned: Floats = halves.swapaxes(1, 2).reshape(values.shape)
        return turned

    return read


def _write_tensor(file: BinaryIO, tensor: _Tensor) -> None:
    values = tensor.read()
    if tensor.kind == "F32":
        file.write(np.ascontiguousarray(values, "<f4").tobytes())
    elif tensor.kind == "F16":
        file.write(np.ascontiguousarray(values, "<f2").tobytes())
    else:
        step = max(1, _ROWS // values.shape[1])
        for begin in range(0, len(values), step):
            blocks = np.ascontiguousarray(values[begin : begin + step]).reshape(-1, 32)
            file.write(ENCODERS[tensor.kind](blocks).tobytes())
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _write_header(file: BinaryIO, metadata: Mapping[str, Any], tensors: list[_Tensor]) -> None:
    file.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        file.write(_string(key) + _value(value))
    place = 0
    for tensor in tensors:
        number = _NUMBERS[tensor.kind][0]
        shape = tensor.shape[::-1]
        file.write(_string(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        file.write(struct.pack("<IQ", number, place))
        place += -(-tensor.size // _ALIGNMENT) * _ALIGNMENT
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode("utf-8", errors="surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Return a value after its type: u32, f32, bool, string, or a list of one of them.

    Integers in a list are i32, the only type in which llama.cpp reads the types of tokens.
    """
    if isinstance(value, list):
        if type(value[0]) is int:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
        number, _ = _scalar(value[0])
        whole = b"".join(_scalar(each)[1] for each in value)
        return struct.pack("<IIQ", 9, number, len(value)) + whole
    number, data = _scalar(value)
    return struct.pack("<I", number) + data


def _scalar(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return 8, _string(value)


def _tokenizer_metadata(config: ModelConfig, text: str) -> dict[str, Any]:
    """Return the vocabulary metadata that reproduces the ids of the model's tokenizer.

    Raises ConfigurationError if there is none.
    """
    path = config.folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing: a GGUF file has its tokenizer with it.")
    own = Tokenizer.from_file(str(path))
    probe = _PROBE + text[:4096]
    wanted = own.encode(probe, add_special_tokens=False).ids
    for found in vocabularies(config.folder):
        tokens, types = (found[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
        made = make_tokenizer(Vocabulary(found, tokens, types), path)
        if _encode(made, probe) == wanted:
            return found
    raise ConfigurationError(
        f"{path} cuts texts in a way that no GGUF file can say (tokenizer.ggml.pre)."
    )


def _encode(tokenizer: dict[str, Any], text: str) -> list[int]:
    return list(
        Tokenizer.from_str(json.dumps(tokenizer)).encode(text, add_special_tokens=False).ids
    )
