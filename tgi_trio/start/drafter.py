"""Which drafter a start uses for speculative decoding, and for how many tokens a step."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from tgi_trio import demo
from tgi_trio.errors import ConfigurationError
from tgi_trio.hub.resolve import Served, resolve_drafter
from tgi_trio.model.speculators.recognise import count_heads
from tgi_trio.settings.records import Options

_log = logging.getLogger("tgi_trio.cli")


def find_drafter(options: Options, found: Served) -> Path | None:
    """Return the folder of the drafter: the flag's, or heads that come with the model.

    Raises ConfigurationError where there are both.
    """
    if options.draft_model is None:
        return found.heads or _embedded_heads(options, found.model)
    if found.heads is not None:
        raise ConfigurationError(
            f"--model-id names heads that draft ({found.heads}), and --draft-model names others: "
            "leave it out, or name the heads' base with --model-id"
        )
    return resolve_drafter(
        str(options.draft_model),
        cache_dir=options.huggingface_hub_cache,
        trust_remote_code=options.trust_remote_code,
        progress=not options.json_output,
    )


def _embedded_heads(options: Options, model: Path) -> Path | None:
    """Return the heads of the embedded model, where drafts are wanted."""
    heads = demo.heads_path()
    wanted = options.speculate and options.drafter is None
    wanted = wanted and model == demo.model_path() and heads.is_dir()
    return heads if wanted else None


def limit_speculation(options: Options) -> Options:
    """Lower --speculate to the number of heads that the embedded model has.

    For heads that were named, a larger number is refused as in TGI; nobody has named these.
    """
    if options.draft_model != demo.heads_path() or not options.speculate:
        return options
    most = count_heads(options.draft_model)
    if options.speculate <= most:
        return options
    _log.warning(
        "--speculate %d: the embedded model has %d heads, so %d tokens a step are drafted",
        options.speculate,
        most,
        most,
    )
    return replace(options, speculate=most)
