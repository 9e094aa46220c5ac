"""Conversions of tokenizers, forked off a process that has imported transformers' tokenizers.

To import them is nearly all that a conversion of a test's tokenizer takes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.warm_children import differs, kind_for
from tests.support.warm_start import EARLY, run_warm
from tgi_trio.router.text import tokenizer_files


class Converters:
    """What stands for the module `subprocess` where tokenizers are converted."""

    TimeoutExpired = subprocess.TimeoutExpired

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str], **rest: Any
    ) -> subprocess.CompletedProcess[str]:
        """Convert in a fork; start what runs code of others, or reads other variables, as ever."""
        early = EARLY | tokenizer_files._CONVERSION_ENV
        same = kind_for("real", env, early) == "real" and not differs(env, early)
        if argv[1:3] != ["-c", tokenizer_files._CONVERT] or argv[-1] != "0" or not same:
            return subprocess.run(argv, env=env, **rest)
        return run_warm(*argv[1:], environment=env, imports="texts")


def fork_conversions() -> None:
    """Have conversions that this process asks for forked from here on."""
    vars(tokenizer_files)["subprocess"] = Converters()
