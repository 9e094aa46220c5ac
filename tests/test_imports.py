"""Imports run one way. This is the table, and the whole tree is held to it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

import tgi_trio

PACKAGE = Path(tgi_trio.__file__).parent


@dataclass(frozen=True)
class Rule:
    """What one part of the package may import; a part is a module or package below tgi_trio."""

    ours: frozenset[str]  # parts, the part itself is always allowed
    banned: frozenset[str] = frozenset()  # never, nor anything inside
    only: frozenset[str] | None = None  # the only outside packages, besides the standard library


def ours(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODEL = ours("torch transformers numba llvmlite triton")
SERVER = ours("trio quart quart_trio hypercorn anyio pytest_trio")
NOTHING = ours("")
# the parts of ipc that await
ROUTER_ENDS = ours("ipc.router_end ipc.tcp_router_end ipc.spawn ipc.watch")
SHARD_ALONE = SERVER | {f"tgi_trio.{name}" for name in ROUTER_ENDS}

# The most specific row of a module counts.
RULES: dict[str, Rule] = {
    "errors": Rule(NOTHING, only=NOTHING),
    "log_levels": Rule(NOTHING, only=NOTHING),
    "logs": Rule(ours("log_levels"), only=ours("orjson")),
    "devices": Rule(ours("errors"), only=NOTHING),
    "model": Rule(ours("errors"), only=NOTHING),
    "model.gguf.folder": Rule(ours("errors model"), only=ours("orjson")),  # megabytes of JSON
    "model.scales": Rule(ours("errors model"), only=ours("numpy")),  # reads numbers of files
    "settings": Rule(
        ours("errors model.config model.facts model.serving model.speculators.recognise"),
        only=NOTHING,
    ),
    # Reads what strangers wrote, so it has no use for anything that could run it.
    "conversion": Rule(
        ours("errors model.config model.adapters.config"), only=ours("numpy safetensors")
    ),
    "hub_download": Rule(ours("errors"), only=ours("huggingface_hub tqdm")),
    "hub_gguf": Rule(ours("errors hub_download model.gguf"), only=NOTHING),
    "hub": Rule(
        ours("errors demo conversion hub_download hub_gguf model.speculators.recognise"),
        only=ours("huggingface_hub"),
    ),
    "ipc": Rule(ours("errors settings"), only=ours("numpy posix_ipc")),
    "sandbox": Rule(ours("errors ipc.parent"), only=NOTHING),
    "images": Rule(ours("errors sandbox ipc.images"), only=ours("numpy PIL transformers")),
    "images.image_text": Rule(NOTHING, only=ours("msgspec")),  # the router reads by it as well
    # The router counts with these.
    "images.canvases": Rule(NOTHING, only=ours("numpy")),
    "images.lfm2": Rule(ours("errors images.canvases"), only=NOTHING),
    "grammars": Rule(ours("errors sandbox"), only=ours("llguidance msgspec numpy tokenizers")),
    "router": Rule(
        ours(
            "errors settings model.config model.image_families model.image_rules logs ipc "
            "images.image_text images.canvases images.lfm2"
        ),
        banned=MODEL,
    ),
    "router.request": Rule(
        ours("ipc.messages router.delta router.images.prompt_image"), only=ours("numpy")
    ),
    "router.scheduling": Rule(
        ours(
            "errors model.image_families router.request router.images.prompt_image "
            "router.images.layouts.layout "
            "ipc.messages ipc.frames ipc.images"
        ),
        only=ours("numpy"),
    ),
    "router.http.wire": Rule(ours("errors"), only=ours("trio")),
    "router.http.wire.http1": Rule(
        ours("router.http.wire.headers router.http.wire.states"), only=ours("httptools")
    ),
    "router.http.wire.states": Rule(NOTHING, only=NOTHING),
    # The only file that knows hypercorn.
    "router.http.wire.http2": Rule(ours("router.http.wire"), only=ours("trio hypercorn")),
    "shard": Rule(ours("errors settings model devices grammars logs ipc"), banned=SHARD_ALONE),
    # The only file of it that makes pixels: of a black image, to see what a tower takes.
    "shard.images.largest": Rule(
        ours("errors ipc images.processors shard.images.features shard.machine"),
        banned=SHARD_ALONE,
    ),
    "signals": Rule(NOTHING, only=ours("trio")),
    "launcher": Rule(
        ours("errors settings model logs hub demo ipc router signals start_tables timeline"),
        banned=MODEL,
    ),
    "timeline": Rule(NOTHING, only=NOTHING),
    "start_tables": Rule(ours("settings logs router.shards"), banned=MODEL),
    "start_checks": Rule(ours("errors settings model devices router.text router.telemetry")),
    "cluster": Rule(
        ours(
            "errors logs signals router.http.sse router.http.wire router.http.dispatch "
            "router.http.messages router.telemetry.metrics "
            "router.telemetry.metric_table"
        ),
        banned=MODEL,
    ),
    # Judgement without a clock or a socket, so that it can be tried in virtual time.
    **{f"cluster.{name}": Rule(NOTHING, only=NOTHING) for name in ("members", "event_cutter")},
    "cluster.prefix_chain": Rule(NOTHING, only=NOTHING),
    "cluster.routing": Rule(ours("cluster.prefix_chain"), only=NOTHING),
    # The only file that knows Ray.
    "cluster.keeper": Rule(
        ours(
            "errors cluster.divided cluster.kept_front cluster.keeping cluster.rank_processes "
            "cluster.replica_host cluster.scaling"
        ),
        only=ours("ray"),
    ),
    "cluster.divided": Rule(NOTHING, only=NOTHING),
    "cluster.rank_processes": Rule(ours("cluster.divided"), only=NOTHING),
    "cluster.kept_front": Rule(NOTHING, only=NOTHING),
    "cluster.scaling": Rule(NOTHING, only=NOTHING),
    "cluster.keeping": Rule(ours("cluster.scaling"), only=NOTHING),
    "cluster.replica_host": Rule(ours("cluster.divided cluster.scaling"), only=NOTHING),
    "cluster.kept_server": Rule(ours("ipc.parent"), only=NOTHING),
    "cluster.news": Rule(ours("cluster.prefix_chain"), only=NOTHING),
    "client": Rule(ours("errors"), only=ours("trio h11 orjson numpy")),
    "cli": Rule(
        ours(
            "errors settings devices log_levels logs hub hub_download "
            "conversion demo ipc router launcher client cluster signals"
        ),
        banned=MODEL,
    ),
    # A made-up shard runs the real worker loop on a made-up model, without torch.
    "testing": Rule(ours("errors settings ipc router shard"), banned=MODEL),
    # Stands in for torch's own device, and runs Triton's kernels; compiles them for real ones.
    **{
        f"testing.stand_in_{part}": Rule(
            ours("testing.stand_in_tensor testing.stand_in_driver testing.stand_in_device"),
            only=ours("torch triton"),
        )
        for part in ("device", "driver", "group", "tensor")
    },
    "testing.compiled_kernels": Rule(
        ours(
            "shard.torch_backend testing.variant testing.kernel_variants testing.code_variants "
            "testing.adapter_variants"
        ),
        banned=SERVER,
    ),
    "testing.variant": Rule(NOTHING, only=ours("torch")),
    "testing.kernel_variants": Rule(
        ours(
            "shard.torch_backend testing.variant testing.attention_variants "
            "testing.choice_variants testing.mixture_variants"
        ),
        banned=SERVER,
    ),
    **{
        f"testing.{what}_variants": Rule(ours("shard.torch_backend testing.variant"), banned=SERVER)
        for what in ("attention", "choice", "mixture", "code", "adapter")
    },
    "testing.quick_interpreter": Rule(ours(""), banned=SERVER),
    "testing.fake_server": Rule(
        ours("__main__ cli demo model.facts"), banned=MODEL
    ),  # a program, like __main__
    "testing.checkpoints": Rule(
        ours("errors testing.tiny_families testing.tiny_hybrids"), banned=SERVER
    ),  # writes tiny model folders
    "testing.wrapped_checkpoints": Rule(
        ours("testing.checkpoints testing.tiny_families"), banned=SERVER
    ),
    "demo": Rule(ours("errors"), banned=SERVER),
    "__main__": Rule(
        ours(
            "cli demo errors hub log_levels logs launcher model.facts model.speculators.recognise "
            "settings signals start_checks timeline cluster.keeper cluster.scaling "
            "devices ipc.litmus ipc.waiting"
        ),
        banned=MODEL,
    ),
    "__init__": Rule(NOTHING, only=NOTHING),
    **{
        name: Rule(ours("errors settings ipc"), only=ours("numpy posix_ipc trio"))
        for name in ROUTER_ENDS
    },
}


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
    assert knowing == {"cluster.keeper"}


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
    assert loaded_by(["tgi_trio.settings.records", "tgi_trio.hub", *cli], heavy) == set()
