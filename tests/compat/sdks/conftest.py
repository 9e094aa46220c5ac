"""A server whose model thinks, calls `shell` and tells what it printed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.compat.agents.scripted import CONTEXT, FOUND, Family, make_model
from tests.system.server import ServerProcess, serving

HERE: Final = Path(__file__).parent
TOOL: Final = "shell"


def _call(thought: str, function: str, command: str) -> str:
    call = json.dumps({"name": function, "arguments": {"command": command}})
    return f"<think>\n{thought}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


THINKING: Final = Family(
    name="thinking",
    end="<|im_end|>",
    special=("<|im_start|>", "<|im_end|>"),
    marks=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    call=_call,
    answer=lambda thought, text: f"<think>\n{thought}\n</think>\n\n{text}",
)


@contextmanager
def serving_script(family: Family, tool: str, folder: Path) -> Iterator[ServerProcess]:
    """Start a server of a model, called `scripted`, that calls a tool and tells what it says."""
    template = (HERE / "thinking.jinja").read_text(encoding="utf-8")
    fake = make_model(family, folder / "model", tool, template)
    flags = ("--model-id", str(folder / "model"), "--served-model-name", "scripted")
    lengths = ("--max-input-tokens", str(CONTEXT - 1), "--max-total-tokens", str(CONTEXT))
    with serving(*flags, *lengths, fake=fake) as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the scripted model, which is called `scripted`."""
    with serving_script(THINKING, TOOL, tmp_path_factory.mktemp("scripted")) as server:
        yield server


class Shell:
    """The tool: it prints what the model waits for, and remembers what it was asked."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def run(self, command: str) -> str:
        """Run a command in a shell and return what it prints."""
        self.commands.append(command)
        return f"{FOUND}\n"


@pytest.fixture
def shell() -> Shell:
    return Shell()
