"""An answer as a sequence of blocks: thoughts, texts and calls, in order.

APIs for agents call them content blocks or output items. Deltas go in, changes come out; a body has
the same blocks that a stream sends piece by piece.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from tgi_trio.router.delta import Delta


class BlockKind(enum.Enum):
    """The kind of a block."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


class BlockChange(enum.Enum):
    """What happens to a block."""

    OPEN = "open"
    MORE = "more"
    CLOSE = "close"


@dataclass(slots=True)
class Block:
    """A part of an answer that is of one kind."""

    kind: BlockKind
    index: int  # among the blocks of the answer
    name: str = ""  # of the function that is called
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the block's text; for a call, its arguments as JSON."""
        return "".join(self.pieces)


class Blocks:
    """The blocks of one answer; only the last of them can be open."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def take(self, delta: Delta) -> Iterator[tuple[BlockChange, Block, str]]:
        """Yield the changes by a delta: the change, the block, and the new text of `MORE`."""
        if delta.thought:
            yield from self._add(BlockKind.THOUGHT, delta.thought)
        if delta.content:
            yield from self._add(BlockKind.TEXT, delta.content)
        for news in delta.calls:
            if news.id is not None:
                yield from self.close()
                yield self._begin(Block(BlockKind.CALL, len(self.all), news.name or "", news.id))
            if news.arguments:
                block = self.all[-1]
                block.pieces.append(news.arguments)
                yield BlockChange.MORE, block, news.arguments

    def extend(self, delta: Delta) -> tuple[Block, str] | None:
        """Add a delta that only continues the open block, as nearly all do.

        Return the block and the text; None if `take` is needed.
        """
        if not self._open or delta.calls:
            return None
        block = self.all[-1]
        if block.kind is BlockKind.TEXT and not delta.thought:
            text = delta.content
        elif block.kind is BlockKind.THOUGHT and not delta.content:
            text = delta.thought
        else:
            return None
        if not text:
            return None
        block.pieces.append(text)
        return block, text

    def close(self) -> Iterator[tuple[BlockChange, Block, str]]:
        """Yield the end of the open block, if there is one."""
        if self._open:
            self._open = False
            yield BlockChange.CLOSE, self.all[-1], ""

    def _add(self, kind: BlockKind, text: str) -> Iterator[tuple[BlockChange, Block, str]]:
        if not self._open or self.all[-1].kind is not kind:
            yield from self.close()
            yield self._begin(Block(kind, len(self.all)))
        block = self.all[-1]
        block.pieces.append(text)
        yield BlockChange.MORE, block, text

    def _begin(self, block: Block) -> tuple[BlockChange, Block, str]:
        self.all.append(block)
        self._open = True
        return BlockChange.OPEN, block, ""
