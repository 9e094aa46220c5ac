"""Models that follow a script: a real family's template and marks, and answers known beforehand.

Asked with QUESTION the model calls a shell, which has to compute FOUND; once FOUND stands in the
prompt it tells it. Nothing else in a prompt holds these numbers, and digits are tokens of their
own, so the tokens of a number stand in a prompt exactly where the number does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

from tests.router.text.template_family import FOLDER
from tgi_trio.demo import model_path
from tgi_trio.testing.fake_model import FakeSettings

ASKED, FOUND = "7351", "25730418"
COMMAND: Final = f"echo $(({int(FOUND) - 1} + 1))"
QUESTION: Final = f"Task {ASKED}: run the command `{COMMAND}` and tell me what it prints."
ANSWER: Final = f"It prints {FOUND}."
ELSE: Final = "Nothing to do."  # to whatever else an agent asks: a title, a summary
THOUGHT: Final = "The shell will know."
CONTEXT: Final = 1 << 17  # tokens: the tools of an agent alone are 40,000 of the small vocabulary


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one template write."""

    name: str  # of the template
    end: str  # the token that ends an answer
    special: tuple[str, ...]  # tokens that are no text
    marks: tuple[str, ...]  # tokens that are text
    call: Callable[[str, str, str], str]  # thought, function, command -> a call
    answer: Callable[[str, str], str]  # thought, text -> an answer


def _arguments(function: str, command: str) -> dict[str, str]:
    return {"cmd" if function == "exec_command" else "command": command}


def _qwen_call(thought: str, function: str, command: str) -> str:
    ((name, value),) = _arguments(function, command).items()
    call = f"<function={function}>\n<parameter={name}>\n{value}\n</parameter>\n</function>"
    return f"{thought}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def _harmony_call(thought: str, function: str, command: str) -> str:
    arguments = json.dumps(_arguments(function, command))
    return (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.{function} <|constrain|>json<|message|>{arguments}<|call|>"
    )


def _mistral_call(thought: str, function: str, command: str) -> str:
    return f"[TOOL_CALLS]{function}[ARGS]{json.dumps(_arguments(function, command))}"


def _harmony_answer(thought: str, text: str) -> str:
    thought = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    return f"{thought}<|channel|>final<|message|>{text}"


FAMILIES: Final = {
    family.name: family
    for family in (
        Family(
            name="qwen3.5",
            end="<|im_end|>",
            special=("<|im_start|>", "<|im_end|>"),
            marks=("<think>", "</think>", "<tool_call>", "</tool_call>"),
            call=_qwen_call,
            answer=lambda thought, text: f"{thought}\n</think>\n\n{text}",
        ),
        Family(
            name="gpt-oss",
            end="<|return|>",
            special=(
                *("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
                *("<|constrain|>", "<|return|>", "<|call|>"),
            ),
            marks=(),
            call=_harmony_call,
            answer=_harmony_answer,
        ),
        Family(
            name="mistral-small-3.2",
            end="</s>",
            special=(
                *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
                *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]"),
                *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[CALL_ID]", "[TOOL_CONTENT]"),
            ),
            marks=(),
            call=_mistral_call,
            answer=lambda thought, text: text,
        ),
    )
}


def make_model(family: Family, folder: Path, function: str, template: str | None = None) -> str:
    """Write the model's folder; return the FakeSettings, as JSON, of its script.

    `function`: the agent's tool that runs commands. `template`: another than the family's.
    """
    source = model_path()
    shutil.copytree(source, folder, ignore=lambda *_: ["model.safetensors"])
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in family.special])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in family.marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(family.end)
    assert end is not None, family.end
    if template is None:
        template = (FOLDER / f"{family.name}.jinja").read_text(encoding="utf-8")
    _edit(folder / "tokenizer_config.json", chat_template=template, eos_token=family.end)
    _edit(folder / "generation_config.json", eos_token_id=end)
    _write_weights(folder, size, end)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    settings = FakeSettings(
        vocab_size=size,
        eos_id=end,
        max_positions=CONTEXT,
        blocks=1 + 4 * CONTEXT // FakeSettings.block_size,
        script=(
            (ids(FOUND), ids(family.answer("It is there.", ANSWER))),
            (ids(ASKED), ids(family.call(THOUGHT, function, COMMAND))),
            ((), ids(family.answer("This is something else.", ELSE))),
        ),
    )
    told = ("vocab_size", "eos_id", "max_positions", "blocks", "script")
    return json.dumps({name: getattr(settings, name) for name in told})


def _edit(path: Path, **values: Any) -> None:
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**fields, **values}), encoding="utf-8")


def _write_weights(folder: Path, vocabulary: int, end: int) -> None:
    """Write the smallest model there is: it is looked at before a start, and never computed."""
    width, heads = 64, {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    shape = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1, **heads}
    _edit(
        folder / "config.json",
        **shape,
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT,
        eos_token_id=end,
    )
    square, layer = (width, width), "model.layers.0"
    tensors = {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"{layer}.self_attn.{name}.weight"] = square
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"{layer}.mlp.{name}.weight"] = square
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}.{name}.weight"] = (width,)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    save_file(zeros, folder / "model.safetensors", metadata={"format": "pt"})
