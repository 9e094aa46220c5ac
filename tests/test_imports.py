"""Imports run one way: the whole tree is held to the table of `import_rules.py`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

import tgi_trio
from tests.support.import_rules import MODEL, RULES, SERVER, Rule

PACKAGE = Path(tgi_trio.__file__).parent


def modules() -> Iterator[tuple[str, Path]]:
    """Yield (dotted name below tgi_trio, path) of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        yield ".".join(parts), path


@cache
def imports(name: str, path: Path) -> list[tuple[int, str]]:
    """Return (line, dotted name) of everything a module imports, inside functions too."""
    return list(_read_imports(name, path))


def _read_imports(name: str, path: Path) -> Iterator[tuple[int, str]]:
    package = ["tgi_trio", *name.split(".")]
    if path.name != "__init__.py":
        package.pop()
    elif name == "__init__":
        package = ["tgi_trio"]
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # what is taken may be a module itself
                yield node.lineno, f"{origin}.{alias.name}"


def within(name: str, parts: frozenset[str]) -> bool:
    """Whether a dotted name is one of `parts` or lies inside one."""
    return any(name == part or name.startswith(part + ".") for part in parts)


def rule_of(name: str) -> tuple[str, Rule]:
    words = name.split(".")
    for length in range(len(words), 0, -1):
        part = ".".join(words[:length])
        if part in RULES:
            return part, RULES[part]
    raise KeyError(name)


def offences(name: str, path: Path) -> Iterator[str]:
    part, rule = rule_of(name)
    for line, imported in imports(name, path):
        top, _, rest = imported.partition(".")
        if within(imported, rule.banned):
            yield f"{path}:{line}: {part} must not import {imported}"
        elif top == "tgi_trio":
            if rest != "__version__" and not within(rest, rule.ours | {part}):
                yield f"{path}:{line}: {part} must not import {imported}"
        elif top in sys.stdlib_module_names:
            continue
        elif rule.only is not None and top not in rule.only:
            yield f"{path}:{line}: {part} must not import {imported}"


def test_every_module_has_a_row() -> None:
    missing = {name.split(".")[0] for name, _ in modules()} - RULES.keys()
    assert not missing


def test_ray_is_known_to_one_file() -> None:
    knowing = {
        name
        for name, path in modules()
        for _, imported in imports(name, path)
        if imported.partition(".")[0] == "ray"
    }
    assert knowing == {"cluster.controller"}


def test_kernels_are_imported_where_they_are_compiled() -> None:
    """A shard that finds them compiled does without them and their compiler."""
    kernels = "shard.cpu_backend.kernels"
    compiling = {
        name
        for name, path in modules()
        for _, imported in imports(name, path)
        if imported.startswith(f"tgi_trio.{kernels}")
    }
    outside = {name for name in compiling if not within(name, frozenset({kernels}))}
    assert outside == {"shard.cpu_backend.machine_code.entry"}


def test_imports_run_one_way() -> None:
    found = [offence for name, path in modules() for offence in offences(name, path)]
    assert not found, "\n".join(found)


def test_no_row_lets_router_and_shard_meet() -> None:
    for part, rule in RULES.items():
        if part != "testing":
            assert not within("shard", rule.ours), part  # shards are other processes
        if part not in ("launcher", "cli", "testing", "__main__"):
            assert not within("router", rule.ours), part
        assert part in ("__main__", "testing.fake_server") or "cli" not in rule.ours, part
        assert "testing" not in rule.ours, part


@pytest.mark.parametrize(
    ("name", "source", "caught"),
    [
        ("router.engine", "def f():\n    import torch.nn", "router must not import torch.nn"),
        ("router.engine", "from tgi_trio import shard", "must not import tgi_trio.shard"),
        (
            "router.engine",
            "from ..shard import loop",
            "must not import tgi_trio.shard",
        ),
        (
            "router.engine",
            "from tgi_trio.shard.contract import X",
            "must not import tgi_trio.shard",
        ),
        ("shard.worker", "import trio", "shard must not import trio"),
        ("shard.worker", "from tgi_trio.ipc.spawn import X", "must not import tgi_trio.ipc.spawn"),
        ("router.http.wire.http1", "import trio", "router.http.wire.http1 must not import trio"),
        ("router.http.wire.server", "import hypercorn", "must not import hypercorn"),
        ("router.http.wire.server", "from tgi_trio.router.http import app", "must not import"),
        ("router.scheduling.queue", "import trio", "router.scheduling must not import trio"),
        ("router.scheduling.queue", "from tgi_trio.router import engine", "must not import"),
        ("settings", "import numpy", "settings must not import numpy"),
        ("ipc.ring", "from tgi_trio.router import engine", "ipc must not import"),
        ("ipc.ring", "import trio", "ipc must not import trio"),
        ("launcher", "import tgi_trio.cli.table", "launcher must not import"),
    ],
)
def test_the_walk_sees_offences(tmp_path: Path, name: str, source: str, caught: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert caught in "\n".join(offences(name, path))


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the circles of a graph: sets of nodes that all reach each other."""
    found = []
    left = dict(edges)
    while left:
        ends = [node for node, targets in left.items() if not targets & left.keys()]
        if not ends:
            found.append(sorted(left))
            break
        for node in ends:
            del left[node]
    return found


def shared_depth(one: list[str], other: list[str]) -> int:
    """Return how many leading words two dotted names share."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def rooms(edges: Iterable[tuple[str, str]]) -> dict[str, dict[str, set[str]]]:
    """Return, for every package, which of its modules and packages imports which other."""
    graph: dict[str, dict[str, set[str]]] = {}
    for importer, imported in edges:
        a, b = importer.split("."), imported.split(".")
        shared = shared_depth(a, b)
        if shared < min(len(a), len(b)):
            room = graph.setdefault(".".join(a[:shared]), {})
            room.setdefault(a[shared], set()).add(b[shared])
            room.setdefault(b[shared], set())
    return graph


def edges() -> Iterator[tuple[str, str]]:
    """Yield (importer, imported), dotted names below tgi_trio, for all imports of our own."""
    names = {name for name, _ in modules()}
    for name, path in modules():
        for _, imported in imports(name, path):
            rest = imported.removeprefix("tgi_trio.")
            ours = rest if rest in names else rest.rpartition(".")[0]
            if ours in names:
                yield name, ours


def test_no_room_has_a_circle() -> None:
    """At every level of the tree, what lies in one package imports its neighbours one way."""
    found = {room: circles(graph) for room, graph in rooms(edges()).items()}
    assert not {room: each for room, each in found.items() if each}


def test_the_search_finds_circles() -> None:
    pairs = [("a.x.one", "a.y.two"), ("a.y.three", "a.x.four"), ("b", "a.x.one")]
    assert [circles(graph) for graph in rooms(pairs).values()] == [[["x", "y"]], []]
    assert rooms([("a", "a.b")]) == {}  # a package and what is in it


def loaded_by(imported: list[str], unwanted: frozenset[str]) -> set[str]:
    """Return which of `unwanted` a fresh process has loaded after importing modules."""
    lines = [f"import {name}" for name in imported]
    lines.append(f"import sys; print(*(sys.modules.keys() & {set(unwanted)!r}))")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def below(part: str) -> list[str]:
    return [f"tgi_trio.{name}" for name, _ in modules() if within(name, frozenset({part}))]


def test_the_router_process_never_loads_a_model_library() -> None:
    names = ("router", "ipc", "client", "cli", "launcher", "hub")
    parts = [module for name in names for module in below(name)]
    assert loaded_by(parts, MODEL | {"huggingface_hub", "opentelemetry"}) == set()


def test_the_shard_process_never_loads_the_server() -> None:
    assert loaded_by(["tgi_trio.shard.loop.worker"], SERVER - {"anyio", "pytest_trio"}) == set()


def test_settings_load_nothing_heavy() -> None:
    heavy = MODEL | SERVER | {"numpy", "huggingface_hub", "tqdm"}
    cli = [f"tgi_trio.cli.{name}" for name in ("flags", "commands", "help", "parser")]
    assert loaded_by(["tgi_trio.settings.records", "tgi_trio.hub.resolve", *cli], heavy) == set()
