"""The models that `bench.model` measures: a checkpoint of a shape, or a GGUF file."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench.harness.checkpoints import SHAPES, make
from bench.harness.fp8 import write_fp8
from bench.harness.quantised import quantise
from bench.peers.environment import Unavailable, last_line
from bench.peers.llama_package import find_libraries
from tgi_trio.model.gguf.files import read_model
from tgi_trio.model.gguf.folder import gguf_folder

PLAIN: Final = "BF16"
# Types of files that llama.cpp makes of a shape, by its numbers of them (gguf.LlamaFileType).
GGUF_NUMBERS: Final = {
    "F32": 0,
    "Q4_0": 2,
    "Q8_0": 7,
    "Q2_K": 10,
    "Q3_K_M": 12,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "TQ1_0": 36,
    "TQ2_0": 37,
    "MXFP4_MOE": 38,  # experts in MXFP4, all else in Q8_0
}
FP8: Final = "FP8"  # no GGUF file, but a checkpoint with scales of blocks
CODES: Final = {"GPTQ": "gptq", "AWQ": "awq"}  # of 4 bits; llama.cpp is given the same as Q4_0
NUMBERS: Final = (*GGUF_NUMBERS, FP8, *CODES)


@dataclass(frozen=True)
class Subject:
    """A model, as everybody is given it."""

    name: str  # "S", "S Q4_K_M", or a file's name
    folder: Path  # what ours are given, and whoever reads safetensors
    weights: int
    head: int  # those of the weights that give logits, of a prompt the last token's alone
    stored: int  # bytes of all weights
    gguf: Path | None = None  # the file, which llama.cpp is given; None: to be written of `folder`
    original: Path | None = None  # the folder of the same model in bfloat16
    expert_weights: int = 0  # of `weights`, those of mixtures of experts
    used: float = 1.0  # of those, the share that a token goes through

    def multiplied(self) -> float:
        """Return the weights that a token is multiplied with."""
        return self.weights - self.expert_weights * (1 - self.used)

    def read(self, rows: int) -> float:
        """Return the share of the weights that a step reads, where any expert is as likely."""
        unread = self.expert_weights * (1 - self.used) ** rows
        return 1 - unread / self.weights if self.used < 1 else 1.0


def find_subjects(
    shapes: Sequence[str],
    numbers: Sequence[str],
    files: Sequence[Path],
    checkpoints: Path,
    home: Path,
) -> Iterator[Subject]:
    """Yield shapes, in bfloat16 unless there are `numbers`, then files; all written as needed.

    Raises Unavailable where llama.cpp, which is kept in `home`, is to make one and cannot.
    """
    cache = checkpoints / "tgi-trio-gguf"
    for shape in shapes:
        plain = shape_subject(shape, checkpoints)
        if not numbers:
            yield plain
            continue
        for each in numbers:
            if each == FP8:
                yield fp8_subject(shape, plain)
                continue
            if each in CODES:
                yield codes_subject(shape, each, plain)
                continue
            file = quantise_shape(plain, each, find_libraries(home))
            yield file_subject(file, cache, f"{shape} {each}", plain.folder)
    for file in files:
        yield file_subject(file, cache)


def shape_subject(shape: str, checkpoints: Path) -> Subject:
    """Return a shape's model in bfloat16, made where it is not there."""
    folder = make(shape, checkpoints / f"tgi-trio-{shape}")
    stored = (folder / "model.safetensors").stat().st_size  # the head's weights are the embedding's
    config = SHAPES[shape]
    head = config["vocab_size"] * config["hidden_size"]
    experts, used = 0, 1.0
    if count := config.get("num_experts", 0):
        experts = 3 * config["hidden_size"] * config["moe_intermediate_size"]
        experts *= count * config["num_hidden_layers"]
        used = config["num_experts_per_tok"] / count
    return Subject(shape, folder, stored // 2, head, stored, expert_weights=experts, used=used)


def fp8_subject(shape: str, plain: Subject) -> Subject:
    """Return a shape's model in FP8, made where it is not there."""
    folder = plain.folder.with_name(f"{plain.folder.name}-{FP8}")
    write_fp8(shape, plain.folder, folder)
    stored = (folder / "model.safetensors").stat().st_size
    return replace(
        plain, name=f"{shape} {FP8}", folder=folder, stored=stored, original=plain.folder
    )


def codes_subject(shape: str, numbers: str, plain: Subject) -> Subject:
    """Return a shape's model in codes of 4 bits, a key of CODES, made where it is not there."""
    folder = plain.folder.with_name(f"{plain.folder.name}-{CODES[numbers]}")
    quantise(shape, CODES[numbers], plain.folder, folder)
    stored = (folder / "model.safetensors").stat().st_size
    return replace(
        plain, name=f"{shape} {numbers}", folder=folder, stored=stored, original=plain.folder
    )


def file_subject(file: Path, cache: Path, name: str = "", original: Path | None = None) -> Subject:
    """Return a GGUF file's model, which ours reads through a folder in `cache`.

    Raises ModelLoadError for a file that is not served.
    """
    folder = gguf_folder(file, cache)
    tensors = {key: info for key, (_, info) in read_model([file]).tensors.items()}
    matrices = {key: info for key, info in tensors.items() if len(info.shape) > 1}
    head = matrices["output.weight" if "output.weight" in matrices else "token_embd.weight"]
    used = {key: info for key, info in matrices.items() if key != "token_embd.weight"}
    used["head"] = head
    return Subject(
        name or file.stem,
        folder,
        sum(math.prod(info.shape) for info in used.values()),
        math.prod(head.shape),
        sum(info.end - info.first for info in used.values()),
        file,
        original,
    )


def write_gguf(folder: Path) -> Path:
    """Return a checkpoint's file in bfloat16, written beside it the first time.

    Raises Unavailable without the gguf package.
    """
    file = folder.with_name(f"{folder.name}-{PLAIN}.gguf")
    if not file.exists():
        unfinished = file.with_suffix(".part")
        script = Path(__file__).parents[1] / "peers" / "to_gguf.py"
        _run("the conversion to GGUF", script, folder, unfinished, PLAIN)
        unfinished.rename(file)
    return file


def quantise_shape(plain: Subject, numbers: str, libraries: Path) -> Path:
    """Return a shape's file as llama.cpp quantises it, written the first time.

    Raises Unavailable where it does not.
    """
    source = write_gguf(plain.folder)
    file = plain.folder.with_name(f"{plain.folder.name}-{numbers}.gguf")
    if not file.exists():
        unfinished = file.with_suffix(".part")
        module, kind = "bench.peers.llama_quantise", str(GGUF_NUMBERS[numbers])
        _run(f"llama.cpp's {numbers}", "-m", module, libraries, source, unfinished, kind)
        unfinished.rename(file)
    return file


def _run(what: str, *command: str | Path) -> None:
    """Run Python on something; raises Unavailable when it fails."""
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{what} failed: {last_line(done.stderr)}")
