"""What a request can ask for: kinds of wishes, of each of which it has one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tests.company.gallery import Gallery
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.media.prompt_image import PromptImage
from tgi_trio.router.request import Request, StoppingCriteria
from tgi_trio.router.text.regexes import compile_regex

VOCAB: Final = 512
_WORDS: Final = 259  # ids from here on are words of common letters; below are bytes and specials
_BASE: Final = [_WORDS + 37 * i % (VOCAB - _WORDS) for i in range(80)]  # what prompts share
_SHOWN_BESIDE: Final = 40  # most words beside images: some models compute them all in one step
_JSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def _grammar(kind: str, value: Any) -> str:
    return json.dumps({"grammars": [{kind: value}]})


@dataclass
class Draft:
    """A request in the making."""

    draw: random.Random
    prompt: list[int] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    stopping: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    # Images by their numbers in a gallery, and where they are: in parts of the prompt.
    shown: list[tuple[int, float]] = field(default_factory=list)


_COMMON, _IMAGES = 3, 9  # images that several requests show, and all

Wish = Callable[[Draft], None]


def _sampling(**values: Any) -> Wish:
    return lambda draft: draft.sampling.update(values)


def _stopping(**values: Any) -> Wish:
    return lambda draft: draft.stopping.update(values)


def _rest(**values: Any) -> Wish:
    return lambda draft: draft.rest.update(values)


def _words(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(_WORDS, VOCAB) for _ in range(count)]


def _own(least: int, most: int) -> Wish:
    return lambda d: d.prompt.extend(_words(d.draw, d.draw.randint(least, most)))


def _shared(least: int, most: int, own: int) -> Wish:
    def write(draft: Draft) -> None:
        draft.prompt += _BASE[: draft.draw.randint(least, most)]
        draft.prompt += _words(draft.draw, draft.draw.randint(0, own))

    return write


def _repeated(draft: Draft) -> None:
    """Write what n-grams find."""
    draft.prompt += _words(draft.draw, draft.draw.randint(2, 4)) * 6


def _bias(draft: Draft) -> None:
    ids = _words(draft.draw, 6)
    values = (4.0, 3.0, 2.0, -5.0, -100.0, 1.0)
    draft.sampling["logit_bias"] = tuple(sorted(dict(zip(ids, values, strict=True)).items()))


def _few(draft: Draft) -> None:
    """Leave few tokens likely: texts repeat themselves, and drafts are right."""
    draft.sampling["logit_bias"] = tuple((i, 12.0) for i in sorted(_words(draft.draw, 3)))


def _drawn(**values: Any) -> Wish:
    def write(draft: Draft) -> None:
        draft.sampling.update(sample=True, seed=draft.draw.getrandbits(40), **values)

    return write


def _images(*numbers: int) -> Wish:
    """Show images anywhere in the prompt."""

    def write(draft: Draft) -> None:
        draft.shown += zip(numbers, sorted(draft.draw.random() for _ in numbers), strict=True)

    return write


def _own_image(draft: Draft) -> None:
    draft.shown.append((draft.draw.randrange(_COMMON, _IMAGES), draft.draw.random()))


def _image_first(draft: Draft) -> None:
    """Begin as others, with their image and words, or another image of as many tokens."""
    draft.prompt = [*_BASE[:20], *draft.prompt]
    draft.shown.append((draft.draw.randrange(_COMMON), 0.0))


# Of each kind a request has one wish.
WISHES: Final[Mapping[str, Mapping[str, Wish]]] = {
    "prompt": {
        "one token": _own(1, 1),
        "short": _own(2, 14),
        "a block": _own(15, 17),
        "long": _own(40, 60),
        "shared": _shared(30, 50, 0),
        "begins as others": _shared(14, 40, 12),
        "repeats itself": _repeated,
    },
    "length": {
        "one": _stopping(max_new_tokens=1),
        "few": lambda d: d.stopping.update(max_new_tokens=d.draw.randint(2, 7)),
        "many": lambda d: d.stopping.update(max_new_tokens=d.draw.randint(14, 24)),
        "very many": lambda d: d.stopping.update(max_new_tokens=d.draw.randint(44, 56)),
    },
    "choice": {
        "best": _sampling(),
        "drawn": _drawn(temperature=0.8),
        "top_k": _drawn(top_k=9),
        "top_p": _drawn(top_p=0.8, temperature=1.3),
        "typical_p": _drawn(typical_p=0.7),
        "min_p": _drawn(min_p=0.05),
        "best of few": _sampling(top_k=2, top_p=0.5),
        "all of them": _drawn(temperature=1.4, top_k=60, top_p=0.9, typical_p=0.95, min_p=0.01),
    },
    "penalty": {
        "none": _sampling(),
        "repetition": _sampling(repetition_penalty=1.4),
        "frequency": _sampling(frequency_penalty=0.7, presence_penalty=0.3),
        "OpenAI's": _sampling(
            frequency_penalty=0.9, presence_penalty=-0.4, absolute_penalties=True
        ),
        "all of them": _sampling(
            repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.2
        ),
    },
    "repeats": {
        "any": _sampling(),
        "no pairs": _sampling(no_repeat_size=2),
        "few tokens": _sampling(no_repeat_size=1, no_repeat_window=9, no_repeat_spared=(1, 2, 3)),
    },
    "bias": {"none": _sampling(), "some": _bias, "to few": _few},
    "watermark": {"no": _sampling(), "yes": _sampling(watermark=True)},
    "grammar": {
        "none": _sampling(),
        "json": _sampling(grammar=_grammar("json_schema", _JSON)),
        "regex": _sampling(grammar=_grammar("lark_grammar", r"start: /([a-e]{2,3} ){1,9}/")),
        "letters": _sampling(grammar=_grammar("lark_grammar", "start: /[a-z]+/")),
    },
    "end": {
        "eos": _sampling(),
        "never": _sampling(ignore_eos=True),
        "string": _stopping(stop=("e", "th"), keep_stop=False),
        "strings kept": _stopping(stop=("ta", "oo", "}")),
        "expression": _stopping(stop_regex=(compile_regex("[aeo]t+"),)),
        "ids": lambda d: d.stopping.update(stop_ids=frozenset(_words(d.draw, 60))),
    },
    "least": {"none": _stopping(), "some": _stopping(min_new_tokens=4)},
    "told": {
        "tokens": _sampling(),
        "top tokens": _sampling(top_n=3),
        "prompt": _sampling(prompt_logprobs=True),
        "all": _sampling(prompt_logprobs=True, prompt_top_n=2, top_n=1),
    },
    "adapter": {"none": _sampling(), "first": _sampling(adapter=1), "other": _sampling(adapter=2)},
    "images": {
        "none": _sampling(),
        "one": _own_image,
        "first": _image_first,
        "two": _images(1, 2),
        "twice": _images(0, 0),
    },
    "salt": {"none": _rest(), "some": _rest(cache_salt="salt")},
    "priority": {"plain": _rest(), "urgent": _rest(priority=-1), "patient": _rest(priority=1)},
}


def write_request(chosen: Mapping[str, str], seed: int, gallery: Gallery | None = None) -> Request:
    """Return a request with the wishes of `chosen`, kind -> name; the rest is drawn by `seed`.

    `gallery`: of the images that it may show.
    """
    draft = Draft(random.Random(seed))
    for kind, name in chosen.items():
        if kind in WISHES:
            WISHES[kind][name](draft)
    most = draft.stopping["max_new_tokens"]
    least = min(most, draft.stopping.get("min_new_tokens", 0))
    stopping = StoppingCriteria(**(draft.stopping | {"min_new_tokens": least}))
    if draft.sampling.get("grammar"):
        draft.sampling["ignore_eos"] = False  # as the router has it: a grammar ends its text
    if draft.shown and gallery is not None:
        draft.rest["images"] = _hang(draft, gallery)
        if own := gallery.choose_adapter([number for number, _ in draft.shown]):
            draft.sampling["adapter"] = own
    ids = np.array(draft.prompt, np.int32)
    return Request(ids, SamplingParameters(**draft.sampling), stopping, **draft.rest)


def _hang(draft: Draft, gallery: Gallery) -> tuple[PromptImage, ...]:
    """Write images into a prompt; returns them."""
    words, found = draft.prompt[:_SHOWN_BESIDE], list[PromptImage]()
    numbers = [number for number, _ in draft.shown]
    draft.prompt, at = [], 0
    for number, part in draft.shown:
        until = round(part * len(words))
        draft.prompt += words[at:until]
        found.append(gallery.place(number, len(draft.prompt), numbers))
        draft.prompt += gallery.find(number).picture.ids
        at = until
    draft.prompt += words[at:]
    return tuple(found)
