"""Merges an adapter of PEFT into its base: LoRA, DoRA, embeddings, biases, modules saved whole.

Files are `adapter_config.json` and `adapter_model.safetensors` or `.bin`. `adapter_changes.py` has
the sums, which are computed in float32 and rounded once, to the base's dtype; `merge_plan.py` finds
the base's tensors for them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from tgi_trio.conversion.adapter_changes import (
    AdapterTensor,
    Change,
    Floats,
    explain_unmerged,
    find_changes,
)
from tgi_trio.conversion.convert import view_strided
from tgi_trio.conversion.floats import RAW, WIDENED, narrow, widen
from tgi_trio.conversion.folder import NEW_INDEX, model_files
from tgi_trio.conversion.merge_plan import MergePlan, plan_merge
from tgi_trio.conversion.pickle_machine import Tensor
from tgi_trio.conversion.safetensors_file import (
    SafetensorsFile,
    TensorEntry,
    lay_out,
    write_safetensors,
)
from tgi_trio.conversion.texts import place_texts
from tgi_trio.conversion.torch_file import TorchFile, open_torch_file
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import AdapterConfig, read_adapter_config
from tgi_trio.model.config import read_config
from tgi_trio.whole_files import parse_json, read_file

_TRANSPOSED: Final = ("gpt2", "openai-gpt")  # their Conv1D has [in, out]
_COPIED: Final = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")


def merge_adapter(
    adapter: Path,
    base: Path,
    target: Path,
    say: Callable[[str], None],
    *,
    own_texts: bool = True,
) -> None:
    """Write `base` with an adapter merged into its weights to the new folder `target`.

    Everything else is copied from the base; with `own_texts`, what the adapter's folder says of
    texts takes its place. Raises ModelLoadError that names what cannot be merged, and OSError.
    """
    config = read_config(base)
    if config.get("quantization_config"):
        raise ModelLoadError(
            f"{base} has quantised weights, which nothing can be added to: name a base in 16 or 32 "
            "bits as base_model_name_or_path of adapter_config.json"
        )
    with read_adapter(adapter) as (adapter_config, changes):
        files = [SafetensorsFile.open(path) for path in model_files(base)]
        shapes = {name: tuple(file.table[name]["shape"]) for file in files for name in file.table}
        unties = not config.get("is_encoder_decoder")  # T5 scales the input of a shared head
        plan = plan_merge(adapter_config, changes, shapes, unties=unties)
        transposed = bool(adapter_config.values.get("fan_in_fan_out"))
        transposed |= config.model_type in _TRANSPOSED
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for number, file in enumerate(files, 1):
            say(f"merging into {file.path.name}, {number} of {len(files)}")
            entries = list(_merge_file(file, plan, transposed))
            write_safetensors(part / file.path.name, lay_out(entries, {}))
    _copy_rest(base, part)
    if plan.head is not None or plan.tokens is not None:
        _rewrite_config(part / "config.json", plan)
        _rewrite_index(part / NEW_INDEX, plan)
    tokens = plan.tokens or config.vocab_size
    if own_texts and (own := place_texts(adapter, base, part, tokens)):
        say(f"the adapter's own: {', '.join(own)}")
    part.replace(target)


def _merge_file(file: SafetensorsFile, plan: MergePlan, transposed: bool) -> Iterator[TensorEntry]:
    """Yield the tensors of one of the base's files, with a new head after its embedding."""
    for name in file.table:
        change = plan.changes.get(name)
        yield file.entry(name) if change is None else _merge_entry(file, name, change, transposed)
        if name == plan.embedding and plan.head is not None:
            yield _merge_entry(file, name, plan.head.change, transposed, plan.head.name)


def _copy_rest(base: Path, target: Path) -> None:
    """Copy the other files beside a model's weights."""
    for path in sorted(base.rglob("*.jinja")) + sorted(base.iterdir()):
        if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".bin.index.json"):
            copy = target / path.relative_to(base)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def _rewrite_config(path: Path, plan: MergePlan) -> None:
    """Write the number of tokens and an untied head to the configuration."""
    config = parse_json(read_file(path))
    text = config.get("text_config")
    for part in (config, *([text] if isinstance(text, dict) else [])):
        if plan.tokens is not None and "vocab_size" in part:
            part["vocab_size"] = plan.tokens
        if plan.head is not None:
            part["tie_word_embeddings"] = False
    path.write_text(json.dumps(config, indent=2))


def _rewrite_index(path: Path, plan: MergePlan) -> None:
    """Write a new head's file to the index."""
    if plan.head is None or plan.embedding is None or not path.is_file():
        return
    index = parse_json(read_file(path))
    index["weight_map"][plan.head.name] = index["weight_map"][plan.embedding]
    path.write_text(json.dumps(index, indent=2))


@contextmanager
def read_adapter(folder: Path) -> Iterator[tuple[AdapterConfig, list[Change]]]:
    """Yield an adapter's configuration and changes, whose tensors can be loaded during the block.

    Raises ModelLoadError that names what cannot be merged.
    """
    config = read_adapter_config(folder)
    if refused := config.find_refused(merged=True):
        raise ModelLoadError(explain_unmerged(config, ", ".join(refused)))
    with ExitStack() as stack:
        yield config, find_changes(config, _adapter_tensors(folder, stack))


def _adapter_tensors(folder: Path, stack: ExitStack) -> Iterator[AdapterTensor]:
    path = folder / "adapter_model.safetensors"
    if path.is_file():
        file = SafetensorsFile.open(path)
        for name, facts in file.table.items():
            yield AdapterTensor(name, tuple(facts["shape"]), partial(file.floats, name))
        return
    opened = stack.enter_context(open_torch_file(folder / "adapter_model.bin"))
    for name, tensor in opened.tensors.items():
        if tensor.dtype not in WIDENED or 0 in tensor.shape:
            raise ModelLoadError(f"{name!r} in {opened.path} is {tensor.dtype}, no float")
        yield AdapterTensor(name, tuple(tensor.shape), partial(_load_torch, opened, tensor))


def _load_torch(file: TorchFile, tensor: Tensor) -> Floats:
    return widen(np.ascontiguousarray(view_strided(file, tensor)), tensor.dtype)


def _merge_entry(
    file: SafetensorsFile, name: str, change: Change, transposed: bool, new_name: str | None = None
) -> TensorEntry:
    """Return the entry of a changed tensor, which is computed as it is written."""
    entry = file.entry(name)
    if entry.dtype not in WIDENED:
        raise ModelLoadError(f"{name} of the base is {entry.dtype}: nothing can be added to it")
    shape = change.shape(entry.shape)
    size = entry.size // entry.shape[0] * shape[0] if entry.shape else entry.size

    def parts() -> Iterator[Any]:
        total = narrow(change.apply(file.floats(name), transposed), entry.dtype)
        if not np.isfinite(widen(total.view(RAW[entry.dtype]), entry.dtype)).all():
            raise ModelLoadError(f"{name} with the adapter is not finite in {entry.dtype}")
        yield np.ascontiguousarray(total).reshape(-1)

    return TensorEntry(new_name or entry.name, entry.dtype, shape, size, parts)
