"""How far logits are from those of a file's own weights: ours and llama.cpp's, on the same file.

    python -m bench.model.accuracy --shapes S M --numbers Q4_0 Q4_K_M Q8_0
    python -m bench.model.accuracy --shapes --files model-Q4_K_M.gguf

Random tokens; the reference is the file's weights dequantised, and float32 from there on.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.harness import stats
from bench.harness.checkpoints import SHAPES
from bench.model.subjects import GGUF_NUMBERS, Subject, find_subjects
from bench.model.texts import Logits, Tally, Text, random_texts
from bench.peers import llama_package
from bench.peers.environment import HOME, Unavailable
from bench.peers.llama_binding import Context, Libraries, Token
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.lookup import Checkpoint, open_checkpoint
from tgi_trio.shard.checkpoint.numbers import Floats, to_float32
from tgi_trio.shard.cpu_backend.forward import Forward, Tokens
from tgi_trio.shard.cpu_backend.instructions import find_variant
from tgi_trio.shard.cpu_backend.loading import load_cpu_runner
from tgi_trio.shard.cpu_backend.program import pack_program
from tgi_trio.shard.machine.cores import usable_cores

OURS, REFERENCE = "kernels", "dequantised, float32"
_BLOCKS = 64  # of K and V: the longest text

Read = Callable[[Text], Logits]


class Dequantised:
    """The `Weights` of a checkpoint as plain numbers, whatever it stores."""

    encoding = None

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def matrix(self, name: str, shape: tuple[int, int], *, transposed: bool = False) -> PlainMatrix:
        stored = self._checkpoint.matrix(name, shape, transposed=transposed)
        return PlainMatrix(to_float32(stored.dequantised()))

    def vector(self, name: str, size: int) -> Floats:
        return self._checkpoint.vector(name, size)

    def array(self, name: str, shape: tuple[int, ...]) -> Floats:
        return self._checkpoint.array(name, shape)


@contextmanager
def read_exactly(folder: Path) -> Iterator[Read]:
    """Yield what reads a text with a folder's dequantised weights, in float32."""
    config = read_config(folder)
    spec = decoder_spec(config)
    if spec is None:
        raise SystemExit("the CPU kernels do not fit this model")
    cores = usable_cores()
    with (
        open_checkpoint(config, spec.names.base) as weights,
        pack_program(spec, Dequantised(weights), "float32", threads=len(cores)) as program,
    ):
        program.allocate_kv(_BLOCKS + 1)
    with Forward(program, find_variant(spec, "float32"), cores) as forward:
        yield lambda text: run_text(forward, text)


@contextmanager
def read_as_served(folder: Path) -> Iterator[Read]:
    """Yield what reads a text as our server does."""
    settings = ShardSettings(model_path=folder, device="cpu")
    runner = load_cpu_runner(settings, read_config(folder))
    runner.warm_up(WarmupRequest(512, _BLOCKS * BLOCK_SIZE, 1, _BLOCKS * BLOCK_SIZE))
    with runner._forward as forward:
        yield lambda text: run_text(forward, text)


@contextmanager
def read_by_llama(libraries: Libraries, file: Path) -> Iterator[Read]:
    """Yield what reads a text with llama.cpp."""
    room = _BLOCKS * BLOCK_SIZE
    threads = len(usable_cores())
    with Context(libraries, file, tokens=room, sequences=1, threads=threads) as context:

        def read(text: Text) -> Logits:
            ids = text.ids[:-1].tolist()
            context.forget(0, 0)
            context.compute([Token(each, place, 0, True) for place, each in enumerate(ids)])
            return np.stack([context.logits(at) for at in range(text.start - 1, len(ids))])

        yield read


def run_text(forward: Forward, text: Text) -> Logits:
    """Return the logits of the tokens that are to be predicted."""
    places = np.arange(len(text.ids) - 1, dtype=np.int32)  # the last predicts nothing
    table = np.arange(1, _BLOCKS + 1, dtype=np.int32)[None]
    tokens = Tokens(
        text.ids[:-1], places, places + BLOCK_SIZE, np.zeros_like(places), table, len(places)
    )
    return forward.run(tokens, places[text.start - 1 :]).copy()


def compare(subject: Subject, libraries: Libraries | None, count: int) -> list[dict[str, Any]]:
    """Return a result for everybody who reads a subject."""
    vocabulary = read_config(subject.folder).vocab_size
    texts = list(islice(random_texts(vocabulary), count))
    with read_exactly(subject.folder) as read:
        references = [read(text) for text in tqdm(texts, desc=f"{subject.name}: {REFERENCE}")]
    results = []
    for name in (OURS, llama_package.NAME):
        with ExitStack() as stack:
            if name == OURS:
                read = stack.enter_context(read_as_served(subject.folder))
            elif libraries is None or subject.gguf is None:
                continue
            else:
                read = stack.enter_context(read_by_llama(libraries, subject.gguf))
            tally = Tally()
            for text, reference in zip(texts, references, strict=True):
                tally.add(text, read(text)[:, :vocabulary], reference[:, :vocabulary])
        results.append(
            {
                "file": subject.name,
                "contender": name,
                "logits' distance": tally.distance,
                "KL, nats": tally.divergence / tally.tokens,
                "same best token": tally.same_best / tally.tokens,
            }
        )
    return results


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", choices=sorted(SHAPES), default=["S"])
    parser.add_argument(
        "--numbers", nargs="+", choices=sorted(GGUF_NUMBERS), default=sorted(GGUF_NUMBERS)
    )
    parser.add_argument("--files", nargs="+", type=Path, default=[], help="GGUF files")
    parser.add_argument(
        "--peers", nargs="*", choices=[llama_package.NAME], default=[llama_package.NAME]
    )
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--home", type=Path, default=HOME, help="where llama.cpp is kept")
    parser.add_argument("--checkpoints", type=Path, default=Path(tempfile.gettempdir()))
    stats.add_output_flags(parser)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    missing: dict[str, str] = {}

    def found() -> tuple[str, dict[str, Any]]:
        return stats.table_of(results), {"results": results, "missing": missing}

    with stats.reporting(args.json, "model.accuracy", found):
        libraries = None
        try:
            if args.peers:
                libraries = Libraries(llama_package.find_libraries(args.home))
        except Unavailable as error:
            missing[llama_package.NAME] = str(error)
        for subject in find_subjects(
            args.shapes, args.numbers, args.files, args.checkpoints, args.home
        ):
            results += compare(subject, libraries, args.texts)


if __name__ == "__main__":
    main()
