"""`download-weights`: fetches a model, converts it if needed, and prints its folder."""

from __future__ import annotations

import orjson

from tgi_trio.cli.options import DownloadOptions
from tgi_trio.conversion.adapters import is_adapter, read_base
from tgi_trio.conversion.folder import find_pickles, model_files
from tgi_trio.errors import ConfigurationError
from tgi_trio.hub.fetching import PICKLES, fetch_pickles
from tgi_trio.hub.projectors import want_projector
from tgi_trio.hub.resolve import resolve_model
from tgi_trio.settings.records import BASE


def run_download(options: DownloadOptions) -> int:
    """Print what `download_weights` returns; the exit code is 0. Raises as it does."""
    print(download_weights(options))
    return 0


def download_weights(options: DownloadOptions) -> str:
    """Return the line to print; JSON with `--json-output`.

    Raises ModelLoadError if the model is not available, ConfigurationError for flags that exclude
    each other.
    """
    progress = not options.json_output
    if options.extension in PICKLES:
        if options.merge_lora:
            raise ConfigurationError("--merge-lora writes .safetensors: leave --extension out")
        folder = fetch_pickles(
            options.model_id,
            options.extension,
            options.revision,
            cache_dir=options.huggingface_hub_cache,
            progress=progress,
        )
        files = find_pickles(folder, [options.extension])
    else:
        folder = resolve_model(
            options.model_id,
            options.revision,
            cache_dir=options.huggingface_hub_cache,
            trust_remote_code=options.trust_remote_code,
            progress=progress,
            auto_convert=options.auto_convert,
            merge_lora=options.merge_lora,
            own_texts=options.adapter_tokenizers != BASE,
            projector=want_projector(options.mmproj, options.no_mmproj),
            flag="MODEL",
        )
        files = model_files(folder)
    size = sum(path.stat().st_size for path in files)
    adapter_of = read_base(folder)[0] if is_adapter(folder) else None
    line = f"{folder} ({size / 1e6:.1f} MB of weights)"
    if adapter_of is not None:
        line = f"{folder} (a LoRA adapter of {adapter_of}, which is here too: see --merge-lora)"
    if not options.json_output:
        return line
    facts = {"folder": str(folder), "weight_bytes": size, "adapter_of": adapter_of}
    return orjson.dumps({"message": line, **facts}).decode()
