"""`print-schema`: prints the OpenAPI document, without a server."""

from __future__ import annotations

from tgi_trio.cli.options import SchemaOptions
from tgi_trio.router.http.openapi import document


def run_print_schema(options: SchemaOptions) -> int:
    """Print the document; the exit code is 0."""
    print(print_schema())
    return 0


def print_schema() -> str:
    """Return the document that a server has at /api-doc/openapi.json."""
    return document().decode()
