"""What `chat` shows of a server's texts: on a terminal nothing that would command it."""

from __future__ import annotations

import io

import pytest

from tgi_trio.cli.chat import Terminal
from tgi_trio.cli.conversation import Piece


class Screen(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


CLIPBOARD, TITLE = "\x1b]52;c;aGk=\x07", "\x9d0;gone\x9c"


@pytest.mark.parametrize(
    ("is_terminal", "shown"),
    [(True, "\\x1b]52;c;aGk=\\x07\\x9d0;gone\\x9c"), (False, CLIPBOARD + TITLE)],
)
def test_a_model_does_not_command_the_terminal(is_terminal: bool, shown: str) -> None:
    """A pipe or a file gets what was written."""
    for color in (False, True):
        screen = Screen(is_terminal)
        terminal = Terminal(screen, color, shows_thoughts=True)
        terminal.show(Piece(CLIPBOARD, thought=True))
        terminal.show(Piece(TITLE, thought=False))
        terminal.show_thought(CLIPBOARD)
        terminal.show_line(TITLE)
        seen = screen.getvalue().replace("\x1b[2m", "").replace("\x1b[22m", "")
        first, second = shown.split("\\x9d" if is_terminal else "\x9d")
        second = ("\\x9d" if is_terminal else "\x9d") + second
        assert seen == f"{first}\n{second}{first}\n{second}\n"
        assert ("\x1b[2m" in screen.getvalue()) == color


def test_text_is_shown_as_it_is() -> None:
    screen = Screen(True)
    Terminal(screen, False).show(Piece("a\tb\r\n\u00fc \U0001f4a5 \u65e5\u672c", thought=False))
    assert screen.getvalue() == "a\tb\n\u00fc \U0001f4a5 \u65e5\u672c"
