"""Computes all `Settings` from the options and the model's facts.

`resolve` decides before anything starts; `with_kv` completes the settings when the warm-up has
found how many KV blocks fit. Both are pure. Errors are TGI's where TGI has them.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Final

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.facts import ModelFacts
from tgi_trio.model.speculators.mtp import no_mtp
from tgi_trio.model.speculators.recognise import count_drafts, find_kind
from tgi_trio.settings.checks import check, number_of_shards
from tgi_trio.settings.elsewhere import check_ranks_elsewhere
from tgi_trio.settings.records import MTP, NGRAM, AsGiven, Options, Settings

DEFAULT_POSITIONS: Final = 4096  # for a model without a longest sequence
DEFAULT_PREFILL_TOKENS: Final = 4096  # TGI's, unless an accelerator suggests another
DRAFTED: Final = 4  # tokens that a draft model drafts ahead
DEFAULT_STEP_TOKENS: Final = 512  # a prefill chunk for which a running stream can wait


def resolve(options: Options, facts: ModelFacts, given: Options | None = None) -> Settings:
    """Decide everything that can be decided before the model is loaded.

    `given`: the options as they were asked for, where what comes with the model has changed some.

    Raises ConfigurationError, naming the setting, if the options do not go together.
    """
    check(options)
    check_ranks_elsewhere(options)
    _check_watermark(options, facts)
    max_input, max_total = _lengths(options, facts)
    max_prefill, budget, batch_size = _step_limits(options, facts)
    name = options.model_id or "tgi-trio/demo"
    return Settings(
        **{
            **{f.name: getattr(options, f.name) for f in fields(AsGiven)},
            "quantize": facts.quantize if options.quantize is None else options.quantize,
            "speculate": _speculate(options),
            "drafter": _drafter(options, facts),
        },
        model_id=name,
        model_sha=facts.revision_sha,
        model_path=facts.path,
        tokenizer_path=facts.tokenizer_path or facts.path,
        model_type=facts.model_type,
        served_model_names=options.served_model_name or (name,),
        dtype=_dtype(options, facts),
        num_shard=number_of_shards(options),
        max_input_tokens=max_input,
        max_total_tokens=max_total,
        max_batch_prefill_tokens=max_prefill,
        max_batch_total_tokens=options.max_batch_total_tokens or 0,
        max_batch_size=batch_size,
        step_token_budget=budget,
        max_queued_tokens=options.max_queued_tokens or options.max_concurrent_requests * max_total,
        explicit=_given_names(given or options),
        overruled=_overruled_names(given or options, options),
    )


def with_kv(
    settings: Settings,
    blocks: int,
    block_size: int,
    state_slots: int = 0,
    host: tuple[int, int] = (0, 0),
) -> Settings:
    """Complete settings with the results of the warm-up.

    `blocks`: blocks that can be granted, without block 0; `block_size`: tokens; `state_slots`:
    slots for recurrent states that can be granted, 0 for a model without states; `host`: blocks and
    slots of which the host's memory holds copies. Limits that were not asked for shrink to what
    fits. Raises ConfigurationError if one that was asked for does not fit.
    """
    supported = blocks * block_size
    if settings.max_batch_total_tokens:
        supported = min(supported, settings.max_batch_total_tokens)
    max_total = settings.max_total_tokens
    if "max_total_tokens" not in settings.explicit:
        max_total = min(max_total, supported)
    if max_total > supported or supported < 2:
        raise ConfigurationError(
            f"Not enough memory to handle `max_total_tokens={max_total}`: the KV cache holds "
            f"{supported} tokens. Lower --max-total-tokens, raise --max-batch-total-tokens if it "
            f"is set, or use a smaller model or --dtype bfloat16"
        )
    max_input = settings.max_input_tokens
    if "max_input_tokens" not in settings.explicit:
        max_input = min(max_input, max_total - 1)
    elif max_input >= max_total:
        raise ConfigurationError(
            "`max_input_tokens` must be < `max_total_tokens`. Given: "
            f"{max_input} and {max_total} (what the KV cache holds)"
        )
    queued = settings.max_queued_tokens
    if "max_queued_tokens" not in settings.explicit:
        queued = settings.max_concurrent_requests * max_total
    prefill = settings.max_batch_prefill_tokens
    if prefill > supported and "max_batch_prefill_tokens" in settings.explicit:
        raise ConfigurationError(
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {prefill} and {supported}"
        )
    prefill = min(prefill, supported)
    budget = min(settings.step_token_budget, prefill)
    return replace(
        settings,
        max_input_tokens=max_input,
        max_total_tokens=max_total,
        max_batch_prefill_tokens=prefill,
        max_batch_total_tokens=supported,
        max_batch_size=min(settings.max_batch_size, budget),
        step_token_budget=budget,
        max_queued_tokens=queued,
        kv_blocks=blocks,
        kv_block_size=block_size,
        state_slots=state_slots,
        host_blocks=host[0],
        host_slots=host[1],
    )


def _check_watermark(options: Options, facts: ModelFacts) -> None:
    size = facts.vocab_size
    if size is not None and int(options.watermark_gamma * size) < 1:
        raise ConfigurationError(
            f"`watermark_gamma` {options.watermark_gamma} of {size} tokens is not one "
            "token: raise it"
        )


def _lengths(options: Options, facts: ModelFacts) -> tuple[int, int]:
    """Return (max_input_tokens, max_total_tokens)."""
    max_input, said = options.max_input_tokens, "max_input_tokens"
    if options.max_input_length is not None:
        said = "max_input_length"
        if max_input is not None:
            raise ConfigurationError(
                f"`max_input_tokens` ({max_input}) and `max_input_length` "
                f"({options.max_input_length}) are both set: define only `max_input_tokens`"
            )
        max_input = options.max_input_length
    longest, whole = facts.max_positions, options.max_batch_total_tokens
    max_total, bound = options.max_total_tokens, "max_total_tokens"
    if max_total is None:
        known = [n for n in (longest, facts.tokenizer_max_length) if n is not None]
        max_total = min(known, default=DEFAULT_POSITIONS)
        if whole is not None and whole < max_total:
            max_total, bound = whole, "max_batch_total_tokens"
    elif longest is not None and max_total > longest:
        raise ConfigurationError(
            f"`max_total_tokens` must be <= {longest}, the longest sequence this model can "
            f"handle. Given: {max_total}"
        )
    if max_total < 2:
        raise ConfigurationError(
            f"`{bound}` must be > 1, a token of a prompt and a new one. Given: {max_total}"
        )
    if max_input is None:
        max_input = max_total - 1
    if max_input >= max_total:
        raise ConfigurationError(f"`{said}`({max_input}) must be < `{bound}`({max_total})")
    if whole is not None and max_total > whole:
        raise ConfigurationError(
            "`max_total_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {max_total} and {whole}"
        )
    return max_input, max_total


def _step_limits(options: Options, facts: ModelFacts) -> tuple[int, int, int]:
    """Return (max_batch_prefill_tokens, step_token_budget, max_batch_size).

    Batch size <= budget <= prefill tokens: a step has room for one token of every running sequence,
    and no step is larger than the one that the warm-up measured.
    """
    prefill = options.max_batch_prefill_tokens
    budget = options.step_token_budget
    batch = options.max_batch_size
    bound = "max_batch_prefill_tokens"  # what limits a step, for errors
    if prefill is None:
        prefill = min(DEFAULT_PREFILL_TOKENS, facts.max_positions or DEFAULT_PREFILL_TOKENS)
        prefill = max(prefill, budget or 0, batch or 0)
    if (whole := options.max_batch_total_tokens) is not None and prefill > whole:
        if options.max_batch_prefill_tokens is not None:
            raise ConfigurationError(
                "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. "
                f"Given: {prefill} and {whole}"
            )
        prefill, bound = whole, "max_batch_total_tokens"
    if budget is None:
        budget = min(prefill, max(DEFAULT_STEP_TOKENS, batch or 0))
    elif budget > prefill:
        raise ConfigurationError(
            f"`step_token_budget` must be <= `{bound}`. Given: {budget} and {prefill}"
        )
    else:
        bound = "step_token_budget"
    if batch is None:
        batch = min(options.max_concurrent_requests, budget)
    elif batch > budget:
        raise ConfigurationError(
            f"`max_batch_size` must be <= `{bound}`. Given: {batch} and {budget}"
        )
    return prefill, budget, batch


def _speculate(options: Options) -> int:
    """Return how many tokens are drafted ahead; by default as many as there are heads."""
    folder, given = options.draft_model, options.speculate
    if folder is None:
        return given or 0
    if find_kind(folder) is not None:
        return count_drafts(folder, given)
    return DRAFTED if given is None else given


def _dtype(options: Options, facts: ModelFacts) -> str:
    """Return the dtype, by default the checkpoint's; float16, slow on CPUs, becomes float32."""
    if options.dtype is not None:
        return options.dtype
    return facts.dtype if facts.dtype in ("float32", "bfloat16") else "float32"


def _given_names(options: Options) -> frozenset[str]:
    """Return the names that differ from their defaults, the older name replaced by its new one."""
    names = {f.name for f in fields(Options) if getattr(options, f.name) != f.default}
    if "max_input_length" in names:
        names = (names - {"max_input_length"}) | {"max_input_tokens"}
    return frozenset(names)


def _overruled_names(given: Options, options: Options) -> frozenset[str]:
    """Return the names of what was asked for and is otherwise.

    A drafter is the folder of the name that was asked for.
    """
    changed = {
        name for name in _given_names(given) if getattr(given, name) != getattr(options, name)
    }
    return frozenset(changed - {"draft_model"})


def _drafter(options: Options, facts: ModelFacts) -> str | None:
    """Return the drafter, as in `Settings.drafter`."""
    layers, most = facts.mtp_layers, _speculate(options)
    if options.drafter == MTP and not layers:
        raise ConfigurationError(no_mtp(facts.path))
    if not most:
        return None
    if options.draft_model is None:
        drafter = options.drafter or (MTP if layers else NGRAM)
        if drafter == MTP and 1 < layers < most:  # an only layer goes on from its own drafts
            raise ConfigurationError(
                f"`speculate` must be <= {layers}: the checkpoint has {layers} layers that draft "
                f"further tokens, each of them one; the `drafter` ngram drafts any number. "
                f"Given: {most}"
            )
        return drafter
    kind = find_kind(options.draft_model)
    return "model" if kind is None else kind.word
