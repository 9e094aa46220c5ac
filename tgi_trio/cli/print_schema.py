"""`print-schema`: prints the OpenAPI document, without a server."""

from __future__ import annotations

from tgi_trio.router.http.openapi import document


def print_schema() -> str:
    """Return the document that a server has at /api-doc/openapi.json."""
    return document().decode()
