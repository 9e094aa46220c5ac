"""The row of gpt-oss, whose answers are messages on channels.

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|channel|>final<|message|>content<|return|>

`channels.py` forces and reads them; the row has the texts around a call.
"""

from __future__ import annotations

from tgi_trio.router.text.tools.format import Format

MARKS = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)

_AS_IN_TEMPLATES = Format(
    name="harmony-recipient-first",
    families="gpt-oss (in the template)",
    signs=("<|channel|>", "<|call|>"),
    trigger=" to=functions.",
    opening="",
    middle="<|channel|>commentary json<|message|>",
    next="",
    closing="<|call|>",
    channels=MARKS,
)
HARMONY = Format(
    name="harmony",
    families="gpt-oss",
    signs=("<|channel|>", "<|call|>"),
    trigger="<|channel|>commentary to=functions.",
    opening="",
    middle=" <|constrain|>json<|message|>",
    next="",
    closing="<|call|>",
    channels=MARKS,
    variants=(_AS_IN_TEMPLATES,),
)
