"""Adapters that are to be refused, and what the refusal names."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULE = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{MODULE}.lora_{letter}.weight" for letter in "AB")
Harm = Callable[[Path], object]


def tensors(**changes: Any) -> Harm:
    """Replace tensors: lora_A and lora_B of a module by letter; None takes one away."""

    def harm(folder: Path) -> None:
        whole: dict[str, Any] = dict(load_file(folder / WEIGHTS))
        named = {"a": A, "b": B}
        for key, change in changes.items():
            name = named.get(key, key)
            whole[name] = None if change is None else change(whole.get(name))
        save_file({n: v for n, v in whole.items() if v is not None}, folder / WEIGHTS)

    return harm


def config(**changes: Any) -> Harm:
    def harm(folder: Path) -> None:
        values = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps(values))

    return harm


def header(change: Callable[[dict[str, Any]], str | bytes]) -> Harm:
    """Write another header before the same data."""

    def harm(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        made = change(json.loads(content[8 : 8 + length]))
        text = made.encode() if isinstance(made, str) else made
        data = content[8 + length :]
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data)

    return harm


def put(where: tuple[int, int], value: float) -> Callable[[Any], Any]:
    def change(old: Any) -> Any:
        new = old.copy()
        new[where] = value
        return new

    return change


def twice(found: dict[str, Any]) -> str:
    entry = json.dumps({A: found[A]})[1:-1]
    return json.dumps(found)[:-1] + f", {entry}}}"


def overlapping(found: dict[str, Any]) -> str:
    """One tensor lies where another does, of the same size."""
    found[A] = found[A.replace("layers.0", "layers.1")]
    return json.dumps(found)


def to_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({"os": os.getcwd()}))


def long_header(folder: Path) -> None:
    """A gigabyte that is said, and of which there is a hole."""
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate((1 << 30) + 16)


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def link_outside(folder: Path) -> None:
    """The weights are a link to a file elsewhere."""
    outside = folder.parent.parent / "outside"
    outside.mkdir(exist_ok=True)
    shutil.move(folder / WEIGHTS, outside / WEIGHTS)
    (folder / WEIGHTS).symlink_to(outside / WEIGHTS)


def replace_config(text: str) -> Harm:
    return lambda folder: (folder / CONFIG).write_text(text)


def to_loop(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)


HOSTILE: dict[str, tuple[Harm, str]] = {
    "nan": (tensors(a=put((0, 0), np.nan)), f"{A} of "),
    "infinite": (tensors(b=put((-1, -1), -np.inf)), f"{B} of "),
    "too large when scaled": (config(lora_alpha=1e40), "times its scale"),
    "columns": (tensors(a=lambda old: old[:, 1:].copy()), f"lora_A of {MODULE} in "),
    "rows": (tensors(b=lambda old: old[1:].copy()), f"lora_B of {MODULE} in "),
    "dimensions": (tensors(b=lambda old: old[None].copy()), f"{B} of "),
    "no b": (tensors(b=None), f"holds no lora_B of {MODULE}"),
    "no a": (tensors(a=None), f"holds no lora_A of {MODULE}"),
    "another rank": (tensors(a=lambda old: old[1:].copy()), "does not fit the rank 4"),
    "integers": (tensors(a=lambda old: old.astype(np.int64)), f"{A} of "),
    "a head": (tensors(**{"base_model.model.lm_head.weight": lambda _: np.ones(3)}), "lm_head"),
    "another module": (
        tensors(
            **{
                A.replace("q_proj", "z_proj"): lambda _: np.ones((4, 8), np.float32),
                B.replace("q_proj", "z_proj"): lambda _: np.ones((8, 4), np.float32),
            }
        ),
        "z_proj, which is not adapted here",
    ),
    "two names of one": (
        tensors(**{A.replace(".weight", ".default.weight"): lambda _: np.ones((4, 8))}),
        f"holds lora_A of {MODULE} twice",
    ),
    "one name twice": (header(twice), f"{A!r} is there twice"),
    "one over another": (header(overlapping), "lies over another one"),
    "no json header": (header(lambda found: b"{" * 5000), "cannot be read as safetensors"),
    "offsets below zero": (
        header(lambda found: json.dumps(found | {A: found[A] | {"data_offsets": [-8, 0]}})),
        f"{A!r} lies outside",
    ),
    "a gigabyte of header": (long_header, "its header cannot be 1073741824 bytes long"),
    "truncated": (cut, "may be truncated"),
    "empty": (lambda folder: (folder / WEIGHTS).write_bytes(b""), "may be truncated"),
    "pickle": (to_pickle, "a pickle, which may hold a program"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"but no {WEIGHTS}"),
    "weights that are a loop of links": (to_loop, f"but no {WEIGHTS}"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), f"holds no {CONFIG}"),
    "config is no json": (replace_config("{r: 4}"), f"{CONFIG} cannot be read"),
    "config is a list": (replace_config("[]"), f"{CONFIG} holds no JSON object"),
    "config is deep": (replace_config("[" * 90_000), f"{CONFIG} cannot be read"),
    "a field of tomorrow": (config(of_tomorrow=3), "of_tomorrow 3"),
    "dora": (config(use_dora=True), "holds no lora_magnitude_vector of "),
    "rank 0": (config(r=0), " no rank or alpha above 0, but 0"),
    "a fraction of a rank": (config(r=4.5), " the rank 4.5"),
    "no rank": (config(r=None), "no rank or alpha above 0, but None"),
    "a huge rank": (config(r=10**30), "does not fit the rank"),
    "alpha": (replace_config('{"peft_type": "LORA", "r": 4, "lora_alpha": NaN}'), "but nan"),
    "a pattern that takes for ever": (
        config(rank_pattern={r"(([a-z_.0-9]+)+)+!": 4}),
        "rank_pattern of ",
    ),
    "many patterns": (
        config(alpha_pattern={f"x{i}": 1 for i in range(2000)}),
        "it has 2000 patterns, more than 1000",
    ),
    "patterns of another kind": (config(rank_pattern=[[1]]), "rank_pattern of "),
    "a link to elsewhere": (link_outside, f"'{WEIGHTS}' of "),
}
