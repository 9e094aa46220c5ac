"""The text processors of adapters that have tokenizers or chat templates of their own.

They are read in a thread: behind the start for adapters that are loaded with the model, for others
when a request first names them. They are dropped with the adapter, or when more have been used
since than adapters are loaded at a time. Nearly all share the vocabulary of the model, so that it
takes milliseconds to make one, and little memory.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import trio

from tgi_trio.errors import ModelLoadError, TgiTrioError, Unavailable, ValidationError
from tgi_trio.process.threads import run_in_thread
from tgi_trio.router.adapters.registry import AGAIN_S, AdapterRegistry
from tgi_trio.router.adapters.served_adapter import ServedAdapter
from tgi_trio.router.text.own_files import ModelVocabulary, read_own_files
from tgi_trio.router.text.text_processor import (
    ModelTextProcessor,
    TextProcessor,
    make_text_processor,
)

log = logging.getLogger(__name__)


class TextProcessors:
    """Reads text processors, and keeps those that were used last."""

    def __init__(
        self, model: ModelTextProcessor, vocabulary: ModelVocabulary | None = None, most: int = 1
    ) -> None:
        """`vocabulary`: None: adapters have the model's text processor, whatever is in their
        folders.

        `most`: text processors that are kept.
        """
        self.model = model.text_processor
        self._with = model
        self._vocabulary = vocabulary
        self._most = most
        self._kept: OrderedDict[int, TextProcessor] = OrderedDict()  # by number of the adapter
        self._reading: dict[int, trio.Event] = {}

    async def find(self, adapter: ServedAdapter) -> TextProcessor:
        """Return an adapter's text processor; a checkpoint where it has to be read.

        Raises Unavailable if its files cannot be used, which the log explains.
        """
        if self._vocabulary is None or adapter.own:
            return self.model
        while (found := self._kept.get(adapter.number)) is None:
            if (reading := self._reading.get(adapter.number)) is None:
                return await self._read(adapter)
            await reading.wait()
        self._kept.move_to_end(adapter.number)
        return found

    async def check(self, folder: Path) -> None:
        """Raise ValidationError unless the texts of an adapter's folder can be served."""
        if self._vocabulary is not None:
            await self._run(self._vocabulary, folder)

    async def warm(self, adapters: AdapterRegistry) -> None:
        """Read the text processors of as many adapters as are kept; errors are in the log."""
        for name in adapters.names[: self._most]:
            with suppress(Unavailable):
                await self.find(adapters.find(name))

    def forget(self, number: int) -> None:
        """Drop the text processor of an adapter."""
        self._kept.pop(number, None)

    def __len__(self) -> int:
        return len(self._kept)

    async def _read(self, adapter: ServedAdapter) -> TextProcessor:
        """Read a text processor for all who ask for it meanwhile, who try again if this one
        cannot."""
        if self._vocabulary is None:
            return self.model
        done = self._reading[adapter.number] = trio.Event()
        try:
            found = await self._run(self._vocabulary, adapter.folder)
        except ValidationError as error:
            log.error("the texts of the adapter `%s` cannot be read: %s", adapter.name, error)
            raise Unavailable(
                f"the files of the adapter `{adapter.name}` cannot be read now, for a reason that "
                "the server's log names",
                AGAIN_S,
            ) from error
        finally:
            del self._reading[adapter.number]
            done.set()
        if parts := _list_own(found, self.model):
            log.info("the adapter %s has its own %s", adapter.name, ", ".join(parts))
        if adapter.listed:  # else it has been unloaded meanwhile, and is not forgotten again
            self._kept[adapter.number] = found
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return found

    async def _run(self, vocabulary: ModelVocabulary, folder: Path) -> TextProcessor:
        def read() -> TextProcessor:
            if not folder.is_dir():  # it would have the model's texts
                raise ModelLoadError(f"there is no folder {folder}")
            files = read_own_files(folder, vocabulary)
            return self.model if files is None else make_text_processor(files, self._with)

        try:
            return await run_in_thread(read)
        except TgiTrioError as error:
            raise ValidationError(str(error)) from error


def _list_own(text_processor: TextProcessor, model: TextProcessor) -> list[str]:
    """Return what an adapter does not share with the model, for the log."""
    own = {
        "tokenizer": text_processor.tokenizer is not model.tokenizer,
        "chat template": text_processor.chat_template is not model.chat_template,
        f"ends ({', '.join(map(str, text_processor.ends))})": bool(text_processor.ends),
    }
    return [name for name, present in own.items() if present]
