"""Kernels that begin early wait for the kernels before them before they write anything."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import plan, sequence, tables
from tests.shard.torch_backend.stand_in_support import small_device, start

need_triton()

from tgi_trio.shard.torch_backend.sampling import choice_kernels  # noqa: E402  (imports Triton)

BACKEND = Path(choice_kernels.__file__).parents[1]
EARLY = {
    "add_and_open",
    *("add_and_normalise", "gate", "open_values", "rotate_and_write", "attend_tile", "merge_parts"),
    *("attend_spans", "write_heads_and_index", "rotate_and_convolve", "rotate_and_expand"),
    *("multiply_few", "multiply_heads", "multiply_several"),
    *("write_shared_keys", "attend_entries", "attend_entry_spans"),
    *("mix_streams", "read_streams", "write_streams"),
    *("predict_streams", "join_detour", "correct_streams", "add_to_others", "match_streams"),
    *("cut_and_gate", "open_own", "activate_alone"),
    *("count_tokens", "survey_scores", "choose_tokens", "begin_rows"),
}
FIRST = "fill_tokens"  # of a step: it is launched as others are, and the one behind it begins early


def functions() -> dict[str, ast.FunctionDef]:
    """Return all that Triton compiles, by name."""
    found: dict[str, ast.FunctionDef] = {}
    for path in sorted(BACKEND.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(each) for each in node.decorator_list
            ):
                found[node.name] = node
    return found


def called(node: ast.AST) -> set[str]:
    """Return the names of what is called anywhere in `node`."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return {ast.unparse(call.func) for call in calls}


def writes(node: ast.AST, every: dict[str, ast.FunctionDef]) -> bool:
    """Return whether anything in `node`, or in what that calls, writes to memory."""
    names = called(node)
    if any(name.startswith(("tl.store", "tl.atomic")) for name in names):
        return True
    return any(writes(every[name], every) for name in names if name in every)


def test_they_wait_whatever_they_find_and_write_behind_it() -> None:
    """In the text: a wait among the statements of the kernel itself, and no writing before it."""
    every = functions()
    early = {name for name, node in every.items() if "let_next_begin" in called(node)}
    assert early == {*EARLY, FIRST}
    for name in EARLY:
        body = every[name].body
        waits = [
            i for i, each in enumerate(body) if ast.unparse(each) == "wait_for_earlier(OVERLAPS)"
        ]
        assert len(waits) == 1, name
        for each in body[: waits[0]]:
            assert not writes(each, every), (name, ast.unparse(each))
            assert not any(isinstance(inner, ast.Return) for inner in ast.walk(each)), name


def test_what_embeds_lets_none_begin_before_it_has_waited() -> None:
    """Behind it may lie the last kernel that writes what later ones read before they wait."""
    told = [ast.unparse(each) for each in functions()["begin_rows"].body[1:3]]
    assert told == ["wait_for_earlier(OVERLAPS)", "let_next_begin(OVERLAPS)"]


def test_what_chooses_is_launched_as_layers_are(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As no other is launched: under the sanitizer, those of layers overlap as well.
    early = {"OVERLAPS": False, "launch_pdl": True}
    monkeypatch.setattr(choice_kernels, "overlap", lambda device: early)
    launched: dict[str, bool] = {}
    with small_device(checkpoint) as device:
        launch = device.launch_kernel

        def note(function: Any, *args: Any, **kwargs: Any) -> None:
            launched[function.fn.__name__] = early.items() <= kwargs.items()
            kwargs.pop("launch_pdl", None)
            launch(function, *args, **kwargs)

        monkeypatch.setattr(device, "launch_kernel", note)
        runner, text = start(checkpoint("llama"), "cuda:0"), [7] * 5
        row = sequence(0, text, tables([text], shuffle=3, new=1)[0], 1)
        with device.idle():
            runner.launch(plan([row], [row.length])).result()
    assert not launched[FIRST]
    of_choices = {name for name in launched if name in EARLY and launched[name]}
    assert of_choices == {"count_tokens", "survey_scores", "choose_tokens"}
