"""A table of the marks that models put around their thoughts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks around a thought, and those that may be around the answer after it."""

    start: str
    end: str
    header: str = ""  # before each of the model's messages, also between thought and answer
    opening: str = ""  # may begin the answer
    closing: str = ""  # may end it
    ending: str = ""  # may end the message, after `closing`

    @property
    def texts(self) -> tuple[str, ...]:
        """Return all marks that are not empty."""
        texts = (self.start, self.end, self.header, self.opening, self.closing, self.ending)
        return tuple(filter(None, texts))


HARMONY: Final = Marks(
    start="<|channel|>analysis<|message|>",
    end="<|end|>",
    header="<|start|>assistant",
    opening="<|channel|>final<|message|>",
    closing="<|return|>",
)

# In the order in which they are tried. White space at either end of a mark is not part of it.
KNOWN: Final = (
    HARMONY,  # gpt-oss
    Marks("<|channel>thought", "<channel|>"),  # Gemma 4
    Marks(  # Kimi K3
        start="<|open|>think<|sep|>",
        end="<|close|>think<|sep|>",
        opening="<|open|>response<|sep|>",
        closing="<|close|>response<|sep|>",
        ending="<|close|>message<|sep|>",
    ),
    Marks(  # Glimmer
        start="to=self<|message|>",
        end="<|eom|>",
        header="<|start|>assistant",
        opening="to=user<|message|>",
    ),
    Marks("<mm:think>", "</mm:think>"),  # MiniMax M3
    Marks("<seed:think>", "</seed:think>"),  # Seed-OSS
    Marks("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A, North
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Marks("<think>", "</think>"),  # DeepSeek, Qwen, GLM, Nemotron and most others
    Marks("Here is my thought process:", "Here is my response:"),  # Granite 3.2
    Marks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel 1.6
)

# Marks around answers after a thought, in templates that contain both: Granite 3.3 and Ernie 4.5;
# Hunyuan A13B.
ANSWERS: Final = (("<response>", "</response>"), ("<answer>", "</answer>"))
