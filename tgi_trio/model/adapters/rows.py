"""The rows of an embedding or a head that an adapter has in place of the model's."""

from __future__ import annotations

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.files import Adapter, TokenRows
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.wrappers import text_name


def find_embedded_rows(adapter: Adapter, spec: DecoderSpec) -> TokenRows | None:
    """Return the rows of the embedding that an adapter has, if they can be replaced.

    Raises ModelLoadError for misfits.
    """
    if spec.embedding_width or spec.added_tokens or spec.normalised_embedding:
        return None
    return _find_rows(adapter, spec, spec.names.embedding)


def find_head_rows(adapter: Adapter, spec: DecoderSpec) -> TokenRows | None:
    """Return the rows of the head that an adapter has, which may be those of the embedding.

    Raises ModelLoadError for misfits.
    """
    names = spec.names
    return _find_rows(adapter, spec, names.embedding if spec.tied_head else names.head)


def _find_rows(adapter: Adapter, spec: DecoderSpec, module: str) -> TokenRows | None:
    bare = module.removeprefix(spec.names.base)
    named = {text_name(name): rows for name, rows in adapter.token_rows.items()}
    rows = named.get(module) or named.get(bare)
    if rows is None:
        return None
    if rows.rows.shape[1] != spec.hidden_size or max(rows.tokens) >= spec.vocab_size:
        raise ModelLoadError(
            f"{rows.name} of {adapter.folder} is {list(rows.rows.shape)}, for tokens up to "
            f"{max(rows.tokens)}; the model has {spec.vocab_size} tokens of {spec.hidden_size} "
            "numbers: the adapter is made for another base"
        )
    return rows
