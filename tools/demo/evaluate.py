"""Ask the held-out questions: ``python -m tools.demo.evaluate [MODEL]``.

Prints each question that was not answered as the corpus answers it, and the share of right ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tgi_trio.demo import model_path
from tools.demo.documents import UNKNOWN
from tools.demo.entries import load_entries, load_heldout

# transformers types its classes loosely; here they are Any.
Model = Any
Tokenizer = Any
MAX_NEW_TOKENS = 120
BATCH_SIZE = 32


def load(folder: Path) -> tuple[Model, Tokenizer]:
    """Load model and tokenizer as the reference does, in the config's dtype."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def answers(
    model: Model,
    tokenizer: Tokenizer,
    conversations: list[list[dict[str, str]]],
) -> list[str]:
    """Answer each conversation greedily; special tokens are kept, so the end shows."""
    import torch

    tokenizer.padding_side = "left"
    found: list[str] = []
    for start in range(0, len(conversations), BATCH_SIZE):
        inputs = tokenizer.apply_chat_template(
            conversations[start : start + BATCH_SIZE],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        width = inputs["input_ids"].shape[1]
        texts = tokenizer.batch_decode(ids[:, width:])
        found += [text.replace(tokenizer.pad_token, "") for text in texts]
    return found


def heldout_results(
    model: Model, tokenizer: Tokenizer, system: str = ""
) -> list[tuple[str, str, str]]:
    """Return (question, expected answer, given answer) for each held-out question."""
    expected = {entry.slug: entry.answer for entry in load_entries()}
    expected["unknown"] = UNKNOWN
    pairs = load_heldout()
    first = [{"role": "system", "content": system}] if system else []
    conversations = [[*first, {"role": "user", "content": question}] for _, question in pairs]
    given = answers(model, tokenizer, conversations)
    return [
        (question, expected[slug] + str(tokenizer.eos_token), answer)
        for (slug, question), answer in zip(pairs, given, strict=True)
    ]


def main() -> None:
    """Evaluate and print what went wrong."""
    parser = argparse.ArgumentParser(description="Ask the embedded model the held-out questions.")
    parser.add_argument("model", type=Path, nargs="?", default=model_path(), help="model folder")
    parser.add_argument("--system", default="", help="a system message to put first")
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    results = heldout_results(model, tokenizer, args.system)
    wrong = [result for result in results if result[1] != result[2]]
    for question, expected, answer in wrong:
        print(f"{question}\n  expected {expected[:70]}\n  answered {answer[:160]}")
    right = len(results) - len(wrong)
    print(f"{right} of {len(results)} right ({right / len(results):.1%})")


if __name__ == "__main__":
    main()
