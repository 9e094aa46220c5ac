"""Prompts for gaps (`suffix`), of a model whose tokenizer has tokens for infilling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from tgi_trio.errors import ValidationError, name_param
from tgi_trio.process.threads import run_in_thread
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.gap_fitting import Count
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.router.http.messages.schema import ExtraFile
from tgi_trio.router.parameters import GenerationParameters
from tgi_trio.router.text.infill import Gap, InfillFormat, OtherFile, find_infill
from tgi_trio.router.text.plain_reading import PlainReader, has_any, special_names

UNNAMED: Final = "tmp"  # a file without a name, as llama.cpp calls it


class AsksForOthers(Protocol):
    """The fields of a body that say what is around a gap."""

    suffix: str | None
    input_extra: list[ExtraFile] | None


class AsksForGap(AsksForOthers, Protocol):
    """These, and what contradicts them."""

    echo: bool | None
    truncate_prompt_tokens: int | None


def find_format(call: Call, field: str = "suffix") -> InfillFormat:
    """Return how the model fills gaps; `field`: what a body has behind one.

    Raises Refused if the model does not, of a `suffix` in TGI's words.
    """
    found = find_infill(call.text_processor.tokenizer.added_tokens)
    if found is None:
        text = "Suffix is not supported and can be achieved by preprocessing the prompt."
        if field != "suffix":
            text = (
                "gaps are not filled: this model's tokenizer has none of the tokens for infilling"
            )
        raise name_param(Refused(422, text, "suffix not supported"), field)
    return found


async def write_gaps(
    call: Call, infill: InfillFormat, body: AsksForGap, prompts: Sequence[object]
) -> list[str | list[int]]:
    """Return the prompts with the body's suffix behind them. Raises ValidationError."""
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name) not in (None, False):
            text = f"`{name}` and `suffix` exclude each other: a gap's prompt is written anew"
            raise name_param(ValidationError(text), name)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise name_param(ValidationError("`suffix` needs a `prompt` of text, not of ids"), "prompt")
    return [await write_gap(call, infill, read_gap(text, body)) for text in texts]


def read_gap(before: str, body: AsksForOthers) -> Gap:
    """Return the gap between `before` and the body's suffix."""
    return Gap(before, body.suffix or "", read_others(body.input_extra))


async def write_gap(
    call: Call, infill: InfillFormat, gap: Gap, *, as_file: bool = False
) -> str | list[int]:
    """Return the prompt for a gap: a text, or ids where a text would not be read as it is meant.

    In other files the name of a special token is mere text, and around the gap if that is read
    `as_file`. Raises ValidationError.
    """
    tokenizer = call.text_processor.tokenizer
    hidden = await call.compute(partial(_find_hidden, call, infill, gap, as_file=as_file))
    if not hidden and not infill.continues:
        return infill.write(gap, tokenizer.added_tokens)

    def encode() -> list[int]:
        if not hidden:
            return infill.encode(gap, tokenizer)
        reader, meant = PlainReader(tokenizer, hidden), gap
        if not as_file:
            before, behind = reader.speak(gap.before), reader.speak(gap.behind)
            meant = replace(gap, before=before, behind=behind)
        form = infill.rename(reader.name)
        if form.continues:
            return form.encode(meant, reader)
        ids: list[int] = reader.encode_ids(form.write(meant, reader.added_tokens)).tolist()
        return ids

    return await run_in_thread(encode)


async def count_plainly(call: Call, infill: InfillFormat, gap: Gap) -> Count:
    """Return what counts the tokens of texts around a gap, which are read as files."""
    hidden = await call.compute(partial(_find_hidden, call, infill, gap, as_file=True))
    if not hidden:
        own = None if call.own_text_processor is None else call.own_text_processor.tokenizer
        return partial(call.engine.validator.count_tokens, tokenizer=own)
    reader = PlainReader(call.text_processor.tokenizer, hidden)

    async def count(text: str) -> int:
        read = partial(reader.encode_ids, text, add_special_tokens=False)
        return len(await run_in_thread(read))

    return count


def _find_hidden(call: Call, infill: InfillFormat, gap: Gap, *, as_file: bool) -> frozenset[str]:
    """Return the names of tokens that are mere text in files; none if no file has any of them."""
    tokenizer, model = call.text_processor.tokenizer, call.engine.text_processors.model.tokenizer
    texts = [text for other in gap.others or () for text in (other.text, other.name)]
    texts += (gap.before, gap.behind) if as_file else ()
    names = {*special_names(tokenizer), *infill.marks, *infill.others_begin, *infill.ends}
    names |= tokenizer.added_tokens.keys() - model.added_tokens.keys()  # an adapter's own
    names &= tokenizer.added_tokens.keys()
    return frozenset(names) if has_any(texts, names) else frozenset()


def read_others(given: Sequence[ExtraFile] | None) -> tuple[OtherFile, ...] | None:
    """Return the parts of other files that a body has; None: it does not speak of any."""
    if given is None:
        return None
    return tuple(OtherFile(each.text, each.filename or UNNAMED) for each in given)


def end_gaps(
    call: Call, infill: InfillFormat, parameters: GenerationParameters
) -> GenerationParameters:
    """Return the parameters with the tokens that end what fills a gap."""
    if parameters.ignore_eos:
        return parameters
    ends = infill.end_ids(call.text_processor.tokenizer.added_tokens)
    return replace(parameters, stop_ids=(*parameters.stop_ids, *ends))
