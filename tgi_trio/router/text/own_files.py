"""What an adapter's folder says of texts: its tokenizer, its chat template, what ends an answer.

Fine-tunes often end turns with a token that the model's tokenizer knows as an ordinary one, use
spare tokens of it for marks of their own, or have another chat template; PEFT's folders then have
the files of a tokenizer beside the adapter. Its tokens have to have the ids that they have for the
model: an adapter that was trained with others has a matrix for them. Tokens may be added, where the
model has rows.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.model.adapters.own_tokens import list_own_tokens
from tgi_trio.router.text.tokenizer_files import (
    TokenizerConfig,
    has_tokenizer,
    read_tokenizer_config,
    tokenizer_json,
)
from tgi_trio.router.text.vocabularies import Comparison, compare_vocabularies, read_apart
from tgi_trio.whole_files import LARGEST, open_file, parse_json, read_file

GENERATION: Final = "generation_config.json"
# Everything that is read here, for whoever has to know where a folder's files come from.
PATTERNS: Final = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("additional_chat_templates/*", "processor_config.json", "vocab*", "merges.txt", "spiece*"),
    *("sentencepiece*", "tekken.json", "*.tiktoken", "tiktoken.model", "config.json", GENERATION),
)
ADVICE: Final = (
    "Merge it into its base by giving its folder to --model-id, or serve it with the model's "
    "tokenizer and template: --adapter-tokenizers base"
)
_REMEMBERED: Final = 256  # tokenizers whose vocabularies have been compared
_SMALL: Final = 1 << 20  # bytes of a tokenizer.json that is compared in milliseconds
_SECONDS: Final = 120.0  # for a process to compare two
_SHOWN: Final = 3  # most tokens in an error


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """What a folder says, read and checked."""

    file: Path | None  # its tokenizer.json; None: it has none
    parts: Mapping[str, Any]  # what that has beside `model`; the model's if there is none
    shares: bool  # whether texts become the model's tokens, so that its vocabulary can be shared
    config: TokenizerConfig
    configured: bool  # whether there is a tokenizer_config.json
    ends: tuple[int, ...]  # of generation_config.json


class ModelVocabulary:
    """The vocabulary of the served model, with which those of adapters are compared.

    Any thread may use it.
    """

    def __init__(self, file: Path, size: int, *, in_subprocess: bool = False) -> None:
        """`file`: the model's tokenizer.json; `size`: rows of its embedding.

        `in_subprocess`: vocabularies are compared by a process of its own. Raises ModelLoadError.
        """
        self.file = file
        self.size = size
        self.parts = read_apart(file)[0]
        self.in_subprocess = in_subprocess
        self._known: OrderedDict[bytes, Comparison] = OrderedDict()  # by sha256
        self._lock = threading.Lock()

    def compare(self, file: Path) -> Comparison:
        """Return how a tokenizer's vocabulary differs from the model's. Raises ModelLoadError."""
        try:
            with open_file(file, LARGEST) as content:
                digest = hashlib.file_digest(content, "sha256").digest()
        except OSError as error:
            raise ModelLoadError(f"{file} cannot be read: {tell_reason(error, file)}") from error
        with self._lock:
            if (known := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
                return known
        found = self._compare(file)
        with self._lock:
            self._known[digest] = found
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return found

    def _compare(self, file: Path) -> Comparison:
        if not self.in_subprocess or file.stat().st_size <= _SMALL:
            return compare_vocabularies(self.file, file)
        argv = [
            sys.executable,
            "-m",
            "tgi_trio.router.text.vocabularies",
            str(self.file),
            str(file),
        ]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = tell_reason(error, sys.executable)
            raise ModelLoadError(f"{file} cannot be compared with the model's: {why}") from error
        if done.returncode:
            raise ModelLoadError((done.stderr.strip().splitlines() or [f"{file} is damaged"])[-1])
        return Comparison(**json.loads(done.stdout))


def read_own_files(folder: Path, model: ModelVocabulary) -> OwnFiles | None:
    """Return what an adapter's folder says of texts; None if nothing.

    Raises ModelLoadError for damaged files, another vocabulary, and tokens that the model has no
    rows for.
    """
    config, configured = read_tokenizer_config(folder), (folder / "tokenizer_config.json").is_file()
    ends = _read_ends(folder / GENERATION)
    file = tokenizer_json(folder) if has_tokenizer(folder) else None
    if file is None and not (configured or config.chat_templates or ends):
        return None
    if max(ends, default=0) >= model.size:
        raise ModelLoadError(
            f"{folder / GENERATION} has `eos_token_id` {max(ends)}; the model has {model.size} "
            "tokens"
        )
    parts: Mapping[str, Any] = model.parts
    shares = True
    if file is not None:
        compared = model.compare(file)
        if not compared.same_ids:
            raise ModelLoadError(
                f"the tokenizer in {folder} has another vocabulary than the model's: "
                f"{compared.difference}. {ADVICE}"
            )
        shares = not compared.difference
        parts = read_apart(file)[0]
        _check_rows(folder, parts, model)
    return OwnFiles(file, parts, shares, config, configured, ends)


def _check_rows(folder: Path, parts: Mapping[str, Any], model: ModelVocabulary) -> None:
    """Raise ModelLoadError for added tokens that the model has no rows for.

    One to pad with is none, nor are those that the model's own tokenizer has.
    """
    known = {(each["content"], each["id"]) for each in model.parts.get("added_tokens") or ()}
    ids = {each["content"]: each["id"] for each in parts.get("added_tokens") or ()}
    beyond = list_own_tokens(folder, model.size, parts) or []
    found = [text for text in beyond if (text, ids.get(text)) not in known]
    if not found:
        return
    shown = ", ".join(f"`{text:.40}`" for text in found[:_SHOWN])
    raise ModelLoadError(
        f"the tokenizer in {folder} adds tokens ({shown}{', ...' if len(found) > _SHOWN else ''}) "
        f"beyond the {model.size} that the model has rows for. {ADVICE}"
    )


def _read_ends(file: Path) -> tuple[int, ...]:
    """Return `eos_token_id` of a generation_config.json. Raises ModelLoadError."""
    try:
        found = parse_json(read_file(file)).get("eos_token_id")
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"{file} cannot be read: {tell_reason(error, file)}") from error
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(each, int) and each >= 0 for each in ids):
        raise ModelLoadError(f"{file} has `eos_token_id` {found!r}, and needs ids of tokens")
    return tuple(ids)
