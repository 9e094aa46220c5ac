"""What is named in back-ticks, in documents, docstrings and comments, is there."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tgi_trio"
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE = re.compile(r"[\w./-]+\.(?:py|md|toml|json|html|js|css|txt|bin)")
FOLDER = re.compile(r"[\w./-]*\w/")
LONG_STRING = re.compile(r'"""(.*?)"""', re.DOTALL)
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]{2,}")
CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)
ATTRIBUTE = re.compile(r"((?:\w+\.)*)([A-Za-z_]\w*)\.([A-Za-z_]\w*)(?:\(.*\))?")

# Files of a model's folder, of other projects and of the machine; not ours to have.
FOREIGN = re.compile(
    r".*\.bin|(config|tokenizer|tokenizer_config|generation_config|special_tokens_map|chat_template"
    r"|processor_config|adapter_config|(hf_)?quant_config|quantize_config|index|(video_)?preprocessor_config"
    r"|added_tokens|vocab|openapi|.*\.safetensors\.index|.*\.bin\.index)\.json|/.*|docs/\w+\.md"
    r"|modeling_\w+\.py|configuration_\w+\.py|config\.py|out\.json|trace\.json"
    r"|opencode\.json|\.aider\.model\.metadata\.json"
)
# Modules that share their name with arguments and attributes: the name alone is looked for.
VARIABLES = {"variant", "settings", "endpoints", "spec", "plan", "batch", "request", "weights"}
FOREIGN_NAMES = re.compile(
    r"http\.(request|disconnect|response|route)(\.\w+)*|gen_ai(\.\w+)+"  # ASGI, OpenTelemetry
    r"|(mlp\.)?experts\.\w+(\.\w+)*"  # tensors of checkpoints and adapters
)
FOREIGN_CONSTANTS = re.compile(r"V\d+|CU_\w+")  # versions of tokenizers, CUDA's driver
FOREIGN_FOLDERS = re.compile(r"/.*|\.venv/|.*demo/model/|dev/shm/|my-model/")


def tracked(*patterns: str) -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / line for line in done.stdout.splitlines()]


@cache
def sources() -> dict[Path, str]:
    """Return the text of every Python file."""
    patterns = ("tgi_trio/*.py", "bench/*.py", "tests/*.py", "tools/*.py", "examples/*.py")
    return {path: path.read_text() for path in tracked(*patterns)}


def comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def mentions() -> tuple[tuple[Path, str], ...]:
    """Return (file, what stands in back-ticks) of every document, docstring and comment.

    To parse all files is slow: any long string is taken for a docstring.
    """
    texts = [(path, path.read_text()) for path in tracked("*.md")]
    for path, source in sources().items():
        texts += [(path, match[1]) for match in LONG_STRING.finditer(source)]
        if re.search("#.*`", source):  # finding comments is slow
            texts += [(path, text) for text in comments(source)]
    return tuple((path, code) for path, text in texts for code in CODE.findall(text))


def references(form: re.Pattern[str]) -> Iterator[tuple[Path, str]]:
    return ((path, code) for path, code in mentions() if form.fullmatch(code))


@cache
def tree() -> frozenset[str]:
    """Return every tracked file and its folders, each also without some folders above it."""
    files = [path.relative_to(ROOT) for path in tracked()]
    folders = {f"{parent}/" for path in files for parent in path.parents}
    paths = {str(path) for path in files} | folders
    return frozenset(path for whole in paths for path in (whole, *list_parts(whole)))


def list_parts(path: str) -> Iterator[str]:
    """Yield what is left of a path without its first folder, its first two, and so on."""
    while "/" in path.rstrip("/"):
        path = path.partition("/")[2]
        yield path


def exists(name: str) -> bool:
    """Whether a path is there, as a whole or without the folders above it."""
    return name in tree()


@cache
def homes() -> dict[str, list[Path]]:
    """Return, by name of a class or module, the files that may have it."""
    found: dict[str, list[Path]] = {}
    for path, source in sources().items():
        if path.parts[len(ROOT.parts)] == "examples":
            continue
        for name in {path.stem, *CLASS.findall(source)}:
            found.setdefault(name, []).append(path)
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(sources()[path])


@cache
def definitions_of(owner: str) -> set[str] | None:
    """Return what the classes and modules of a name have: methods, fields, functions, constants.

    None: there is none of that name.
    """
    found: set[str] | None = None
    for path in homes().get(owner, ()):
        tree = parsed(path)
        if path.stem == owner:
            found = (found or set()).union(names_in(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == owner:
                found = (found or set()).union(names_in(node))
                for base in node.bases:  # what may be inherited is not looked for
                    if ast.unparse(base) not in ("object", "Protocol", "NamedTuple"):
                        found.add("*")
    return found


@cache
def is_defined(name: str) -> bool:
    """Return whether anything of ours has a name."""
    word = re.compile(rf"\b{name}\b")
    return any(
        name in names_in(parsed(path)) for path, source in sources().items() if word.search(source)
    )


@cache
def words() -> frozenset[str]:
    """Return the words of all sources, but for what stands in back-ticks."""
    return frozenset(
        word for source in sources().values() for word in re.findall(r"\w+", CODE.sub("", source))
    )


def names_in(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def is_there(owner: str, name: str) -> bool:
    """Whether `owner.name` can be ours: true of owners that are not ours, and of variables."""
    if owner in VARIABLES:
        return is_defined(name)
    own = definitions_of(owner)
    return own is None or name in own or "*" in own


def test_files_that_are_named_are_there() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, name in references(FILE)
        if not FOREIGN.fullmatch(name) and not exists(name)
    }
    assert not missing, "\n".join(sorted(missing))


def test_folders_that_are_named_are_there() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, name in references(FOLDER)
        if not FOREIGN_FOLDERS.fullmatch(name) and not exists(name)
    }
    assert not missing, "\n".join(sorted(missing))


def test_names_of_ours_that_are_named_are_there() -> None:
    missing = set()
    for path, code in references(ATTRIBUTE):
        match = ATTRIBUTE.fullmatch(code)
        place = code.replace(".", "/")
        if match is None or FILE.fullmatch(code) or exists(f"{place}.py") or exists(f"{place}/"):
            continue
        if FOREIGN_NAMES.fullmatch(code) is None and not is_there(match[2], match[3]):
            missing.add(f"{path.relative_to(ROOT)}: {code}")
    assert not missing, "\n".join(sorted(missing))


def test_constants_that_are_named_are_there() -> None:
    """In CONTRIBUTING.md, docstrings and comments; other documents name variables, too."""
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, name in references(CONSTANT)
        if (path.suffix == ".py" or path.name == "CONTRIBUTING.md")
        and name not in words()
        and not FOREIGN_CONSTANTS.fullmatch(name)
    }
    assert not missing, "\n".join(sorted(missing))


@pytest.mark.parametrize(
    ("owner", "name", "there"),
    [
        ("Scheduler", "commit", True),
        ("Scheduler", "comit", False),
        ("torch", "anything", True),
        ("lifecycle", "TRANSITIONS", True),
        ("lifecycle", "TRANSITION", False),
    ],
)
def test_what_is_not_there_is_found(owner: str, name: str, there: bool) -> None:
    assert is_there(owner, name) is there
