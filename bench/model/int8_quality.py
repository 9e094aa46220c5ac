"""What 8-bit weights cost in quality: logits and answers against those of the weights as they are.

    python -m bench.model.int8_quality                   # the embedded model, held-out questions
    python -m bench.model.int8_quality --model-id FOLDER # random tokens: how far logits move

Every text is read once, so each token is predicted from the right ones before it. An answer counts
as given where each of its tokens, the end too, is the best one: then it is what greedy decoding
says. The reference is float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.harness import stats
from tgi_trio import demo
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.contract import BLOCK_SIZE
from tgi_trio.shard.numba_backend.forward import Forward, Tokens
from tgi_trio.shard.numba_backend.instructions import variant_for
from tgi_trio.shard.numba_backend.program import pack_program
from tools.demo.documents import UNKNOWN
from tools.demo.entries import load_entries, load_heldout

Logits = NDArray[np.float32]
_CONTENDERS = {
    "float32": ("float32", False),
    "bfloat16": ("bfloat16", False),
    "int8, float32": ("float32", True),
    "int8, bfloat16": ("bfloat16", True),
}


@dataclass(frozen=True)
class Text:
    """Token ids, of which those from `start` on are to be predicted."""

    ids: NDArray[np.int32]
    start: int


@dataclass
class Tally:
    """What is known of one contender; sums over tokens that were to be predicted."""

    tokens: int = 0
    nats: float = 0.0
    same_best: int = 0
    given: int = 0  # texts whose every token is the best one
    squares: float = 0.0  # of the differences to the reference
    size: float = 0.0  # squares of the reference

    def add(self, text: Text, logits: Logits, reference: Logits) -> None:
        right = text.ids[text.start :]
        exact = logits.astype(np.float64)
        masses = np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1))
        best = logits.argmax(axis=1)
        self.tokens += len(right)
        self.nats += float((masses + exact.max(axis=1) - exact[np.arange(len(right)), right]).sum())
        self.same_best += int((best == reference.argmax(axis=1)).sum())
        self.given += bool((best == right).all())
        self.squares += float(((exact - reference) ** 2).sum())
        self.size += float((reference.astype(np.float64) ** 2).sum())


def conversations(folder: Path) -> Iterator[Text]:
    """Yield the held-out questions of the embedded model with their answers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    answers = {entry.slug: entry.answer for entry in load_entries()} | {"unknown": UNKNOWN}
    for slug, question in load_heldout():
        asked = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        whole = prompt + answers[slug] + str(tokenizer.eos_token)
        ids = np.array(tokenizer(whole, add_special_tokens=False).input_ids, np.int32)
        yield Text(ids, start)


def random_texts(vocabulary: int) -> Iterator[Text]:
    """Yield random tokens, all but the first to be predicted."""
    draw = np.random.default_rng(0)
    for _ in range(4):
        yield Text(draw.integers(3, vocabulary, 64, dtype=np.int32), 1)


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
    forward = Forward(program, variant_for(spec, dtype, int8=int8), [0])

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
                    "perplexity": float(np.exp(tally.nats / tally.tokens)),
                    "same best token": tally.same_best / tally.tokens,
                    "texts given": tally.given,
                    "logits' distance": (tally.squares / tally.size) ** 0.5,
                }
            )


if __name__ == "__main__":
    main()
