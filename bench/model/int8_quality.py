"""What 8-bit weights cost in quality: logits and answers against those of the weights as they are.

    python -m bench.model.int8_quality                   # the embedded model, held-out questions
    python -m bench.model.int8_quality --model-id FOLDER # random tokens: how far logits move

What is counted is in `texts.py`; the reference is float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.harness import stats
from bench.model.texts import Logits, Tally, Text, conversations, random_texts
from tgi_trio import demo
from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.cpu_backend.forward import Forward, Tokens
from tgi_trio.shard.cpu_backend.instructions import find_variant
from tgi_trio.shard.cpu_backend.program import pack_program

_CONTENDERS = {
    "float32": ("float32", False),
    "bfloat16": ("bfloat16", False),
    "int8, float32": ("float32", True),
    "int8, bfloat16": ("bfloat16", True),
}


def reader(folder: Path, dtype: str, int8: bool) -> tuple[Forward, Callable[[Text], Logits]]:
    """Return a model and what reads a text: logits of the tokens that are to be predicted."""
    config = read_config(folder)
    spec = decoder_spec(config)
    if spec is None:
        raise SystemExit("the CPU kernels do not fit this model")
    blocks = 64
    with (
        open_checkpoint(config, spec.names.base) as weights,
        pack_program(spec, weights, dtype, int8=int8) as program,
    ):
        program.allocate_kv(blocks + 1)
    forward = Forward(program, find_variant(spec, dtype, int8=int8), [0])

    def read(text: Text) -> Logits:
        places = np.arange(len(text.ids) - 1, dtype=np.int32)  # the last predicts nothing
        table = np.arange(1, blocks + 1, dtype=np.int32)[None]
        rows = np.zeros_like(places)
        tokens = Tokens(text.ids[:-1], places, places + BLOCK_SIZE, rows, table, len(places))
        return forward.run(tokens, places[text.start - 1 :]).copy()

    return forward, read


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-id", type=Path, help="folder; the embedded model without")
    parser.add_argument("--texts", type=int, help="only so many; all by default")
    stats.add_output_flags(parser)
    args = parser.parse_args()
    folder = args.model_id or demo.model_path()
    every = random_texts(read_config(folder).vocab_size) if args.model_id else conversations(folder)
    texts = list(islice(every, args.texts))
    results: list[dict[str, Any]] = []

    def found() -> tuple[str, dict[str, Any]]:
        tokens = sum(len(text.ids) - text.start for text in texts)
        text = f"{len(texts)} texts, {tokens:,} tokens to predict\n{stats.table_of(results)}"
        return text, {"model": folder.name, "results": results}

    references: list[Logits] = []
    with stats.reporting(args.json, "model.int8_quality", found):
        for name, (dtype, int8) in _CONTENDERS.items():
            tally = Tally()
            forward, read = reader(folder, dtype, int8)
            with forward:
                for i, text in enumerate(tqdm(texts, desc=name)):
                    logits = read(text)
                    if len(references) == i:
                        references.append(logits)
                    tally.add(text, logits, references[i])
            results.append(
                {
                    "contender": name,
                    "perplexity": tally.perplexity,
                    "same best token": tally.same_best / tally.tokens,
                    "texts given": tally.given,
                    "logits' distance": tally.distance,
                }
            )


if __name__ == "__main__":
    main()
