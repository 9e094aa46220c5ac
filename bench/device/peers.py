"""The same shape through other engines, those that are installed: random weights, greedy decodes.

    python -m bench.device.peers transformers FOLDER 1 16

A process per engine, since each takes the device for itself. Prints a line of JSON per batch size:
seconds of a decode step, by the difference between a long and a short answer.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SHORT, _LONG = 8, 72  # tokens
_PROMPT = 64
_PATIENCE_S = 240.0

Generate = Callable[[list[list[int]], int], list[int]]  # prompts, tokens: how many each got


def installed() -> list[str]:
    """Return the engines that can be imported."""
    return [name for name in ENGINES if importlib.util.find_spec(name) is not None]


def measure_peer(name: str, folder: Path, batches: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return a row per batch size, or one that says why there is none."""
    argv = [sys.executable, "-m", "bench.device.peers", name, str(folder), *map(str, batches)]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [{"what": name, "why": f"not done within {_PATIENCE_S:g} s"}]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
    if done.returncode:
        last = (done.stderr.strip() or "nothing was said").splitlines()[-1]
        rows.append({"what": name, "why": last})
    return rows


def _transformers(folder: Path) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    found = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if found is None else found
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = model.to(device).eval()

    def generate(prompts: list[list[int]], tokens: int) -> list[int]:
        with torch.inference_mode():
            found = model.generate(
                torch.tensor(prompts, device=device),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            ).tolist()
        return [len(own) - len(prompt) for own, prompt in zip(found, prompts, strict=True)]

    return generate


def _vllm(folder: Path) -> Generate:
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16")

    def generate(prompts: list[list[int]], tokens: int) -> list[int]:
        asked = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], asked)
        return [len(own.outputs[0].token_ids) for own in found]

    return generate


def _sglang(folder: Path) -> Generate:
    sglang: Any = importlib.import_module("sglang")
    engine = sglang.Engine(model_path=str(folder), skip_tokenizer_init=True, dtype="bfloat16")

    def generate(prompts: list[list[int]], tokens: int) -> list[int]:
        asked = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        found = engine.generate(input_ids=prompts, sampling_params=asked)
        return [own["meta_info"]["completion_tokens"] for own in found]

    return generate


ENGINES: dict[str, Callable[[Path], Generate]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
}


def step_seconds(generate: Generate, rows: int) -> float:
    """Return what a decode step of `rows` rows takes.

    Raises ValueError where an engine says less than it is asked for: the times would mean nothing.
    """
    prompts = [[5 + i % 7] * _PROMPT for i in range(rows)]
    generate(prompts, _SHORT)  # compiles and records what there is
    took = []
    for tokens in (_SHORT, _LONG):
        began = time.perf_counter()
        got = generate(prompts, tokens)
        took.append(time.perf_counter() - began)
        if got != [tokens] * rows:
            raise ValueError(f"{rows} rows were to get {tokens} tokens each, and got {got}")
    return (took[1] - took[0]) / (_LONG - _SHORT)


def main() -> None:
    """Measure one engine, as the command line says."""
    name, folder, batches = sys.argv[1], Path(sys.argv[2]), [int(text) for text in sys.argv[3:]]
    generate = ENGINES[name](folder)
    for rows in batches:
        step = step_seconds(generate, rows)
        print(json.dumps({"what": f"{name}, decode {rows}", "step_ms": step * 1e3}), flush=True)


if __name__ == "__main__":
    main()
