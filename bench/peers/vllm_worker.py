"""vLLM as a contender of `bench.model`, in its own environment:

    PEER/venv/bin/python bench/peers/vllm_worker.py FOLDER [ADAPTER ...]

With folders of LoRA adapters the rows of a step have them in turns.
A line of JSON comes in per measurement, the fields of a `Case`, and one with its milliseconds goes
out. The engine runs in this process and is stepped by hand, so that every step has its own time.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_VOCABULARY = 40000  # ids below this are in every shape
_ENOUGH = 64  # tokens: the first rows still decode when the last have been prefilled


class Steps:
    """An engine that computes what a case asks for, step by step."""

    def __init__(self, folder: Path, adapters: Sequence[Path] = ()) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read on import
        from vllm import LLM, SamplingParams, TokensPrompt
        from vllm.lora.request import LoRARequest

        lora: dict[str, Any] = {}
        if adapters:
            most = len(adapters)
            lora = {"enable_lora": True, "max_loras": most, "max_cpu_loras": most}
        self._adapters: list[Any] = [
            LoRARequest(path.name, i, str(path)) for i, path in enumerate(adapters, start=1)
        ]
        self._engine: Any = LLM(
            str(folder),
            dtype="bfloat16",
            max_model_len=1100,
            max_num_seqs=32,
            enforce_eager=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            **lora,
        ).llm_engine
        self._sampling, self._prompt = SamplingParams, TokensPrompt
        self._random = random.Random(0)
        self._requests = 0

    def measure(self, case: dict[str, Any]) -> float:
        """Return milliseconds: of the prefill, or the median of the decode steps."""
        contexts = case["contexts"][:1] if case["prefill"] else case["contexts"]
        names = [self._add(context, 1 if case["prefill"] else _ENOUGH) for context in contexts]
        clock = time.process_time if case["processor"] else time.perf_counter
        if case["prefill"]:
            start = clock()
            while self._engine.has_unfinished_requests():
                self._engine.step()
            return (clock() - start) * 1e3
        decodes: list[float] = []
        while len(decodes) < case["steps"] + 1:
            start = clock()
            outputs = self._engine.step()
            seconds = clock() - start
            lengths = [len(output.outputs[0].token_ids) for output in outputs]
            if len(lengths) == len(contexts) and min(lengths) > 1:
                decodes.append(seconds)  # every row decoded and nothing else was computed
        self._engine.abort_request(names)
        return statistics.median(decodes[1:]) * 1e3

    def _add(self, context: int, new: int) -> str:
        """Add a request of `context` random tokens; return its name."""
        self._requests += 1
        name, own = str(self._requests), self._adapters
        lora = own[self._requests % len(own)] if own else None
        ids = [self._random.randrange(3, _VOCABULARY) for _ in range(context)]
        sampling = self._sampling(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        prompt = self._prompt(prompt_token_ids=ids)
        self._engine.add_request(name, prompt, sampling, lora_request=lora)
        return name


def main(folder: Path, adapters: Sequence[Path]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints is no answer
    steps = Steps(folder, adapters)
    print("ready", file=answers)
    for line in sys.stdin:
        print(json.dumps(steps.measure(json.loads(line))), file=answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
