"""The embedded model in every form that `--quantize` makes: size, speed and quality.

    python -m bench.model.formats --json out.json

Held-out questions are read with the right answers; what is counted is in `texts.py`. The reference
is float32.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.harness import stats
from bench.model.accuracy import run_text
from bench.model.bare import BareModel
from bench.model.texts import Logits, Tally, conversations, random_texts
from tgi_trio import demo
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.quantised.recognise import MADE_AT_LOAD
from tgi_trio.shard.cpu_backend.loading import load_cpu_runner

_PLAIN = ("float32", "bfloat16")  # the first is the reference
_STEPS = 40  # decode steps in a reading
_LONGEST = 1024  # tokens of a text


def read_texts(folder: Path, name: str, texts: list[Any], references: list[Logits]) -> Any:
    """Return bytes of all weights, and the tally; the first to come makes the references."""
    plain = name in _PLAIN
    settings = ShardSettings(
        model_path=folder,
        device="cpu",
        dtype=name if plain else "bfloat16",
        quantize=None if plain else name,
    )
    runner = load_cpu_runner(settings, read_config(folder))
    size = runner.warm_up(WarmupRequest(512, _LONGEST, 1, _LONGEST)).weight_bytes
    tally = Tally()
    with runner._forward as forward:
        for i, text in enumerate(tqdm(texts, desc=name)):
            logits = run_text(forward, text)
            if len(references) == i:
                references.append(logits)
            tally.add(text, logits, references[i])
    return size, tally


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-id", type=Path, help="folder; the embedded model without")
    parser.add_argument("--words", nargs="+", choices=MADE_AT_LOAD, default=list(MADE_AT_LOAD))
    parser.add_argument("--texts", type=int, help="only so many; all by default")
    stats.add_output_flags(parser)
    args = parser.parse_args()
    folder = args.model_id or demo.model_path()
    every = random_texts(read_config(folder).vocab_size) if args.model_id else conversations(folder)
    texts = list(islice(every, args.texts))
    references: list[Logits] = []
    results: list[dict[str, Any]] = []

    def found() -> tuple[str, dict[str, Any]]:
        return stats.table_of(results), {"model": folder.name, "results": results}

    with stats.reporting(args.json, "model.formats", found):
        for name in (*_PLAIN, *args.words):
            size, tally = read_texts(folder, name, texts, references)
            word = None if name in _PLAIN else name
            step = BareModel(folder, quantize=word, dtype=name if word is None else "bfloat16")
            results.append(
                {
                    "weights": name,
                    "MB": size / 1e6,
                    "decode 1, ms": step.decode_ms([160], _STEPS),
                    "perplexity": tally.perplexity,
                    "KL, nats": tally.divergence / tally.tokens,
                    "same best token": tally.same_best / tally.tokens,
                    "texts given": tally.given,
                }
            )
            del step  # and its threads, before the next has some


if __name__ == "__main__":
    main()
