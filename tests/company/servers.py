"""Servers that companies meet: loaded once, and opened as one house after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.company.behind import Speaking
from tests.company.bodies import FOLDERS
from tests.company.call_house import CallHouse
from tests.company.companies import Companies
from tests.company.gallery import Seeing
from tests.company.group import Group
from tests.company.guests import Customs, Guest
from tests.company.house import House
from tests.company.kinds import KINDS, MADE, Kind
from tests.company.shard import Lead
from tests.company.texts import OWN_TEXTS
from tests.shard.adapters.peft_support import write_adapter
from tgi_trio.grammars.compiler import load_tokenizer
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.adapters.own_adapters import find_own_adapters
from tgi_trio.model.config import read_config
from tgi_trio.model.image_rules import image_rules
from tgi_trio.router.media.media_model import find_media_model
from tgi_trio.router.scheduling import state_memory
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.media.loading import load_encoder
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.sampling.guides import Grammars
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.testing.stand_in_device import StandInDevice

_ADAPTERS = 2
_TARGETS: Final = ("all-linear", ["q_proj", "down_proj"])  # of each adapter
_LORA = 8
_LONGEST_S = 1.0  # seconds of a sound
_ROUNDING: Final = 2e-3  # of log-probabilities that torch computes in steps of other shapes
# The same where rounding may decide what is chosen (12 runs of 4 tokens, two with scores that
# differ by 1e-5 of themselves: 0.016), or to which of few numbers K and V are rounded (0.003).
_STEP: Final = 3e-2


class Server:
    """A model that is loaded, which one house after the other is opened with."""

    def __init__(self, kind: Kind, folder: Path, device: StandInDevice | None = None) -> None:
        """Make it in `folder`; `device`: entered while it is loaded, and whenever it serves."""
        base = kind.model(folder / "model")
        make_drafter = (
            None if kind.make_drafter is None else kind.make_drafter(folder / "drafter", base)
        )
        text = base if kind.text is None else kind.text(folder / "text")
        count = _ADAPTERS if kind.adapted else 0
        self.adapters = [
            write_adapter(text, folder / name, seed=i, target_modules=targets)
            for i, (name, targets) in enumerate(list(zip(FOLDERS, _TARGETS, strict=True))[:count])
        ]
        config = read_config(base)
        self._own = find_own_adapters(config.values, base)
        if kind.called:
            for adapter, write in zip(self.adapters, OWN_TEXTS, strict=False):
                write(adapter, base)
        given: dict[str, Any] = {"cpu_threads": 1, "dtype": "float32", **kind.settings}
        settings = ShardSettings(
            model_path=base,
            draft_model=make_drafter,
            tokenizer_file=base / "tokenizer.json",
            max_lora_rank=_LORA if count or self._own else 0,
            **given,
        )
        self.kind = kind
        self.seeing: Seeing | None = None
        if kind.family:  # first: what computes the text binds this thread
            model = find_media_model(base) if kind.called or kind.family in MADE else None
            longest = "" if model is None else model.describe_longest(_LONGEST_S)
            hearing = replace(settings, longest_sound=longest)
            encoder = load_encoder(hearing, os.sched_getaffinity(0))
            numbers = {each: count + i for i, each in enumerate(self._own, start=1)}
            self.seeing = Seeing.of(*(kind.family, encoder, image_rules(config), model, numbers))
        self._device = device
        self._settings = settings
        with self._entered():
            self._lead = self._load()
        with self._lead() as runner:
            self.info = runner.info
        self.tokenizer = Tokenizer.from_folder(base)
        self._speaking = None
        if kind.called:
            sees, adapted = self.seeing is not None, bool(count)
            self._speaking = Speaking.of(base, self.tokenizer, adapted=adapted, sees=sees)
        self.speculate = 0
        self._stages = settings.pipeline_stages
        if self.info.speculates and (kind.make_drafter is not None or settings.speculate):
            self.speculate = settings.speculate or 3
        self.exact = self.info.backend.startswith("kernels")
        text_config = config.values.get("text_config", config.values)
        steps = "index_topk" in text_config or str(settings.kv_cache_dtype).startswith("fp8")
        self.tolerance = 0.0 if self.exact else _STEP if steps else _ROUNDING

    def wishes(self) -> dict[str, frozenset[str]]:
        """Return which wishes it serves, by kind, where it does not serve all."""
        found = {} if self.kind.adapted else {"adapter": frozenset({"none"})}
        return found if self.kind.family else found | {"images": frozenset({"none"})}

    def ways(self) -> dict[str, frozenset[str]]:
        """Return how it may be run, by kind, where not all ways are open."""
        found = {} if self.kind.family else {"images held": frozenset({"many"})}
        if not self.kind.called:
            found["responses kept"] = frozenset({"all"})
        else:  # which a front's requests would have to be
            found["resumed"] = frozenset({"nobody"})
        if not (self.kind.called and self.kind.adapted):
            found["adapters held"] = frozenset({"all"})
        if self.kind.settings.get("world_size", 1) > 1:  # a step that fails ends the group
            found["failures"] = frozenset({"none"})
        if not self.speculate or self.kind.called:  # whose sequences nobody here knows
            found["drafts"] = frozenset({"own"})
        if not self.info.prefix_reuse:
            found["prefixes"] = frozenset({"forgotten"})
        elif not self.kind.settings.get("prefix_cache_host_bytes"):
            found["prefixes"] = frozenset({"forgotten", "cached"})
        return found

    def companies(
        self,
        seed: int,
        wishes: Mapping[str, frozenset[str]] | None = None,
        ways: Mapping[str, frozenset[str]] | None = None,
    ) -> Companies:
        """Return companies that it serves; `wishes`, `ways`: of some kinds, instead of all."""
        gallery = None if self.seeing is None else self.seeing.gallery
        asked, around = self.wishes() | dict(wishes or {}), self.ways() | dict(ways or {})
        return Companies(seed, asked, around, gallery, self.kind.called)

    def house(
        self,
        customs: Customs,
        guests: Sequence[Guest],
        *,
        alone: bool = False,
        foretold: Sequence[Sequence[int]] = (),
    ) -> House:
        """Return a house for guests; `alone`: in which nobody drafts. `foretold`: as there."""
        calls = self._speaking is not None
        adapted = calls or any(guest.request.sampling.adapter for guest in guests)
        adapters = [*self.adapters, *(() if calls else self._own.values())]
        options = ShardOptions(
            speculate=0 if alone else self.speculate, pipeline_stages=self._stages
        )
        given = (self._lead, self._load, self.tokenizer, customs, guests)
        more: dict[str, Any] = {
            **{"options": options, "adapters": adapters if adapted else (), "foretold": foretold},
            **{"seeing": self.seeing, "around": self._entered},
            "warming": nullcontext if self._device is None else self._device.idle,
        }
        if self._speaking is None:
            return House(*given, **more)
        return CallHouse(*given, **more, speaking=self._speaking, own=self._own)

    def _load(self) -> Lead:
        """Load the model."""
        if self._settings.world_size > 1:
            return Group(self._settings).lead
        load = load_runner if self._device is None else _load_on_device
        runner = load(self._settings)
        return lambda: nullcontext(runner)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with nullcontext() if self._device is None else self._device:
            yield


def _load_on_device(settings: ShardSettings) -> Runner:
    """Return a runner on a stand-in device, which records decodes of few rows."""
    config = read_config(settings.model_path)
    file, eos, size = settings.tokenizer_file, config.eos_ids, config.vocab_size
    assert file is not None
    grammars = Grammars(lambda *_: load_tokenizer(file, eos, size))
    return load_torch_runner(
        settings,
        read_config(settings.model_path),
        device="cuda:0",
        graph_sizes=(2, 4),
        grammars=grammars,
    )


@contextmanager
def early_snapshots() -> Iterator[None]:
    """Have states saved behind every block: prompts of the length that pays would take too long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_memory, "LEAST_SAVED", 1)
        yield


class Servers:
    """Servers by name, each made once, in folders below one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Server] = {}

    def __getitem__(self, name: str) -> Server:
        if name not in self._made:
            folder = self._folder / name.replace(", ", "-").replace(" ", "_")
            self._made[name] = Server(KINDS[name], folder)
        return self._made[name]
