"""Ask the held-out questions: ``python -m tools.demo.evaluate [MODEL]``.

Prints each question that was not answered as the corpus answers it, and the shares of right ones.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tgi_trio.demo import model_path
from tools.demo.documents import UNKNOWN
from tools.demo.entries import (
    Entry,
    Tool,
    load_entries,
    load_heldout,
    load_heldout_tools,
    load_tools,
    load_words,
)
from tools.demo.markup import END_THOUGHT, CallTurn
from tools.demo.tool_use import OfferedTool, answer_from, find, think_of

# transformers types its classes loosely; here they are Any.
Model = Any
Tokenizer = Any
Message = dict[str, Any]
MAX_NEW_TOKENS = 160
BATCH_SIZE = 128
FOLLOW_UPS = ("Tell me more.", "Why does that matter?", "Please go on.")  # the last is new to it
NO_TOOL_EACH = 6  # of the questions about the server one in so many is asked with tools as well


@dataclass(frozen=True)
class Asked:
    """One conversation as the chat template gets it."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinks: bool = False


@dataclass(frozen=True)
class Result:
    """What was asked, what the corpus says, what the model said; texts end in the end token."""

    question: str
    expected: str
    given: str

    @property
    def right(self) -> bool:
        """Return whether the two are equal."""
        return self.expected == self.given


def load(folder: Path) -> tuple[Model, Tokenizer]:
    """Load model and tokenizer as the reference does, in the config's dtype."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def answers(model: Model, tokenizer: Tokenizer, asked: Sequence[Asked]) -> list[str]:
    """Answer each conversation greedily; special tokens are kept, so the end shows."""
    import torch

    tokenizer.padding_side = "left"
    found: list[str] = []
    for start in range(0, len(asked), BATCH_SIZE):
        prompts = [_render(tokenizer, each) for each in asked[start : start + BATCH_SIZE]]
        inputs = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        width = inputs["input_ids"].shape[1]
        texts = tokenizer.batch_decode(ids[:, width:])
        found += [text.replace(tokenizer.pad_token, "") for text in texts]
    return found


def _render(tokenizer: Tokenizer, asked: Asked) -> str:
    return str(
        tokenizer.apply_chat_template(
            asked.messages,
            tools=asked.tools or None,
            add_generation_prompt=True,
            enable_thinking=asked.thinks,
            tokenize=False,
        )
    )


def heldout_results(
    model: Model,
    tokenizer: Tokenizer,
    *,
    system: str = "",
    thinks: bool = False,
    tools: Sequence[Tool] = (),
    each: int = 1,
) -> list[Result]:
    """Ask every `each`-th held-out question; a thought in front of an answer is not compared."""
    expected = {entry.slug: entry.answer for entry in load_entries()}
    expected["unknown"] = UNKNOWN
    pairs = load_heldout()[::each]
    if tools:  # what nobody knows may be a question for a tool
        pairs = [(slug, question) for slug, question in pairs if slug != "unknown"]
    first = [{"role": "system", "content": system}] if system else []
    described = [describe(plainly(tool)) for tool in tools]
    asked = [
        Asked([*first, {"role": "user", "content": question}], described, thinks)
        for _, question in pairs
    ]
    given = answers(model, tokenizer, asked)
    return [
        Result(question, expected[slug] + str(tokenizer.eos_token), _said(answer, thinks))
        for (slug, question), answer in zip(pairs, given, strict=True)
    ]


def follow_up_results(model: Model, tokenizer: Tokenizer, question: str) -> list[Result]:
    """Ask for more after each answer that has more to it, the answer being the corpus's."""
    entries = [entry for entry in load_entries() if entry.more]
    asked = [
        Asked(
            [
                {"role": "user", "content": _ask_about(entry)},
                {"role": "assistant", "content": entry.answer},
                {"role": "user", "content": question},
            ]
        )
        for entry in entries
    ]
    return [
        Result(f"{entry.slug}: {question}", entry.more + str(tokenizer.eos_token), answer)
        for entry, answer in zip(entries, answers(model, tokenizer, asked), strict=True)
    ]


def call_results(model: Model, tokenizer: Tokenizer, *, thinks: bool = False) -> list[Result]:
    """Ask the held-out questions for tools, each beside two other tools; expect the calls."""
    given = answers(model, tokenizer, [_ask_for_call(*row, thinks) for row in load_heldout_tools()])
    tools = {tool.slug: plainly(tool) for tool in load_tools()}
    return [
        Result(
            question,
            _call(tools[slug], value).text + str(tokenizer.eos_token),
            _said(answer, thinks),
        )
        for (slug, question, value), answer in zip(load_heldout_tools(), given, strict=True)
    ]


def result_results(model: Model, tokenizer: Tokenizer, *, thinks: bool = False) -> list[Result]:
    """Hand the model what the right calls found; expect it to say just that."""
    tools, words, rng = load_tools(), load_words(), random.Random(0)
    by_slug = {tool.slug: tool for tool in tools}
    asked, expected = [], []
    for slug, question, value in load_heldout_tools():
        first = _ask_for_call(slug, question, value, thinks)
        call, result = _call(plainly(by_slug[slug]), value), find(by_slug[slug], words, rng)
        arguments = {plainly(by_slug[slug]).argument: value} if value else {}
        function = {"name": call.name, "arguments": arguments}
        turn: Message = {"role": "assistant", "tool_calls": [{"function": function}]}
        if thinks:
            turn["reasoning_content"] = call.thought
        said = {"role": "tool", "content": result}
        asked.append(Asked([*first.messages, turn, said], first.tools, thinks))
        expected.append(answer_from(by_slug[slug], value, result) + str(tokenizer.eos_token))
    given = answers(model, tokenizer, asked)
    return [
        Result(each.messages[0]["content"], right, _said(answer, thinks))
        for each, right, answer in zip(asked, expected, given, strict=True)
    ]


def plainly(tool: Tool) -> OfferedTool:
    """Offer a tool by its first names."""
    return OfferedTool(tool, tool.names[0], tool.arguments[0], (), tool.about[0])


def describe(offered: OfferedTool) -> dict[str, Any]:
    """Return a tool as a client sends it."""
    properties = {offered.argument: {"type": "string"}} if offered.argument else {}
    return {
        "type": "function",
        "function": {
            "name": offered.name,
            "description": offered.about,
            "parameters": {"type": "object", "properties": properties},
        },
    }


def _ask_about(entry: Entry) -> str:
    if entry.singular:
        return f"What is {entry.singular[0]}?"
    return f"What are {entry.plural[0]}?" if entry.plural else entry.questions[0]


def _ask_for_call(slug: str, question: str, value: str, thinks: bool) -> Asked:
    tools = load_tools()
    at = [tool.slug for tool in tools].index(slug)
    beside = [tools[(at + step) % len(tools)] for step in (3, 0, 1)]
    messages = [{"role": "user", "content": question}]
    return Asked(messages, [describe(plainly(tool)) for tool in beside], thinks)


def _call(offered: OfferedTool, value: str) -> CallTurn:
    thought = think_of(offered.name, value)
    return CallTurn(offered.name, offered.write_arguments(value), "", thought)


def _said(answer: str, thinks: bool) -> str:
    """Return what follows the thought; the whole text where a thought does not end."""
    if not thinks:
        return answer
    _, _, behind = answer.partition(f"\n{END_THOUGHT}\n\n")
    return behind or answer


def main() -> None:
    """Evaluate and print what went wrong."""
    parser = argparse.ArgumentParser(description="Ask the embedded model the held-out questions.")
    parser.add_argument("model", type=Path, nargs="?", default=model_path(), help="model folder")
    parser.add_argument("--system", default="", help="a system message to put first")
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    three = load_tools()[:3]
    parts = {
        "questions": heldout_results(model, tokenizer, system=args.system),
        "questions, thinking": heldout_results(
            model, tokenizer, system=args.system, thinks=True, each=NO_TOOL_EACH
        ),
        "questions beside tools": heldout_results(model, tokenizer, tools=three, each=NO_TOOL_EACH),
        "more of it": [
            result
            for question in FOLLOW_UPS
            for result in follow_up_results(model, tokenizer, question)
        ],
        "calls": call_results(model, tokenizer),
        "calls, thinking": call_results(model, tokenizer, thinks=True),
        "answers from results": result_results(model, tokenizer),
        "answers from results, thinking": result_results(model, tokenizer, thinks=True),
    }
    for name, results in parts.items():
        wrong = [result for result in results if not result.right]
        for result in wrong:
            print(f"{result.question}\n  expected {result.expected[:90]!r}")
            print(f"  answered {result.given[:200]!r}")
        right = len(results) - len(wrong)
        print(f"{name}: {right} of {len(results)} right ({right / len(results):.1%})", flush=True)


if __name__ == "__main__":
    main()
