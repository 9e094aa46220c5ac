"""The model types of transformers, and those with which it can generate text.

They are read from its source: importing transformers brings torch and takes seconds, and its tables
of types are literals.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# The files that list every type with a configuration, in different versions.
_CONFIGURATIONS = ("auto_mappings.py", "configuration_auto.py")
_TABLES = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",  # most vision models are only in this one
)


def list_text_types() -> frozenset[str]:
    """Return the types that can generate text; empty if the tables cannot be found."""
    tree = _parse("modeling_auto.py")
    return frozenset(_types(tree))


@cache
def list_configured_types() -> frozenset[str]:
    """Return every word in the tables of configurations; empty if they cannot be found.

    They include class names, which does not matter for finding that a type is unknown.
    """
    trees = map(_parse, _CONFIGURATIONS)
    nodes = (node for tree in trees for node in ast.walk(tree))
    words = (node.value for node in nodes if isinstance(node, ast.Constant))
    return frozenset(word for word in words if isinstance(word, str))


def _parse(name: str) -> ast.Module:
    """Return a file of transformers' tables, parsed; an empty module if there is none."""
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return ast.Module([], [])
    path = Path(found.submodule_search_locations[0], "models", "auto", name)
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _types(tree: ast.Module) -> Iterator[str]:
    """Yield the keys of `NAME = OrderedDict([(key, class), ...])` for every table."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if not names.intersection(_TABLES):
            continue
        for pair in ast.walk(node.value):
            if isinstance(pair, ast.Tuple) and isinstance(pair.elts[0], ast.Constant):
                yield str(pair.elts[0].value)
