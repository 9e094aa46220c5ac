"""`download-weights`: fetch a model and print where it is."""

from __future__ import annotations

from tgi_trio.hub import resolve_model
from tgi_trio.settings import Options


def download_weights(options: Options) -> str:
    """Return the line to print. Raises ModelLoadError when the model cannot be had."""
    folder = resolve_model(
        options.model_id,
        options.revision,
        cache_dir=options.huggingface_hub_cache,
        trust_remote_code=options.trust_remote_code,
        progress=not options.json_output,
    )
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return f"{folder} ({size / 1e6:.1f} MB of weights)"
