"""What cannot be served is refused here: before a shard is spawned, and without torch.

Only files and drivers are asked. What is read here, but for config.json, is read again by whoever
uses it: a few milliseconds, against the seconds that a shard takes to say the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tgi_trio.devices import check_device_flags, may_see_device
from tgi_trio.errors import ConfigurationError, ModelLoadError, TgiTrioError
from tgi_trio.model.adapters.files import read_adapter
from tgi_trio.model.adapters.sites import map_adapter
from tgi_trio.model.adapters.trained_whole import check_saved
from tgi_trio.model.check import (
    check_checkpoint,
    check_draft_model,
    check_model,
    heads_refusal,
    model_spec,
    supported_spec,
)
from tgi_trio.model.config import ModelConfig, read_config
from tgi_trio.model.fit.cpu_kernels import activations_error, find_undivided, find_unsupported
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.speculators.assistant import AssistantSpec
from tgi_trio.model.speculators.eagle import check_hidden_states
from tgi_trio.model.speculators.mtp import need_mtp
from tgi_trio.model.speculators.recognise import find_kind, read_heads
from tgi_trio.model.speculators.spec import EagleSpec
from tgi_trio.router.telemetry.tracing import check_tracing_files, check_tracing_installed
from tgi_trio.router.text.own_files import ModelVocabulary, read_own_files
from tgi_trio.router.text.tokenizer_files import read_tokenizer_config, tokenizer_json
from tgi_trio.router.text.tokenizer_shape import check_tokenizer_json, find_difference
from tgi_trio.settings.base_names import names_base
from tgi_trio.settings.idle import find_idle
from tgi_trio.settings.records import MTP, OWN, Settings

_OWN_MEMORY: Final = Path("/proc/self/status")


def check_start(settings: Settings, config: ModelConfig, *, merged: bool = False) -> list[str]:
    """Refuse what cannot be served so; converts a tokenizer of an older format, once.

    `config`: the model's, read with `settings.rope`; `merged`: whether an adapter has been merged
    into it. Returns warnings, a sentence each. Raises ModelLoadError, ConfigurationError.
    """
    if not _OWN_MEMORY.exists():
        raise ConfigurationError(
            "/proc is not mounted, where a shard reads how much memory there is and how much it "
            "has: mount it (mount -t proc proc /proc)"
        )
    asked = bool(settings.cuda_graphs) or settings.cuda_memory_fraction != 1.0
    if asked and (settings.device == "cpu" or not _may_have_device(settings)):
        check_device_flags(settings.cuda_graphs, settings.cuda_memory_fraction)
    warnings = find_idle(settings, merged=merged)
    warnings += check_model(config, settings)
    if settings.activations == 8:
        _check_rounding(settings, config)
    if settings.adapter_folder is not None and not settings.adapter_updates:
        raise ConfigurationError("`adapter_folder` has no effect without `adapter_updates`")
    if settings.serves_adapters:
        warnings += _check_adapters(settings, config)
    _check_tokenizer(settings)
    if settings.draft_model is not None:
        _check_drafter(settings, config, settings.draft_model)
    if settings.drafter == MTP:
        _check_own_layers(config)
    if settings.otlp_endpoint is not None:
        check_tracing_installed()
        check_tracing_files(settings.otlp_endpoint)
    if settings.max_image_bytes < settings.max_image_fetch_size:
        warnings.append(
            f"--max-image-bytes {settings.max_image_bytes}, which all requests' images have "
            f"together, is less than one may have (--max-image-fetch-size "
            f"{settings.max_image_fetch_size}): larger ones are refused whenever they come"
        )
    return warnings


def _check_rounding(settings: Settings, config: ModelConfig) -> None:
    """Raise where torch on a CPU is sure to compute a model whose activations are to be rounded."""
    if settings.ranks_elsewhere or (settings.device != "cpu" and may_see_device()):
        return  # other machines may have devices, too
    spec = model_spec(config)
    if not isinstance(spec, DecoderSpec):
        return  # `check_model` has refused it
    # The shard may widen the dtype: no reason is looked for there.
    reason = find_unsupported(spec, "float32")
    if reason is not None or settings.cpu_backend == "torch":
        raise activations_error(reason)
    reason = find_undivided(spec, settings.num_shard // settings.pipeline_stages)
    if reason is not None:
        raise activations_error(reason, settings.num_shard)


def _may_have_device(settings: Settings) -> bool:
    """Return whether a rank may see a device: other machines are not asked."""
    return settings.ranks_elsewhere > 0 or may_see_device()


def _check_drafter(settings: Settings, config: ModelConfig, folder: Path) -> None:
    """Raise for what cannot draft for the model: heads of another, a model of other tokens."""
    if find_kind(folder) is not None:
        spec = model_spec(config)
        if not isinstance(spec, DecoderSpec):
            raise ConfigurationError(heads_refusal(config))
        heads = read_heads(folder, hidden=spec.hidden_size, vocabulary=spec.vocab_size)
        if isinstance(heads, EagleSpec):
            check_hidden_states(folder, spec)
            heads.taps(len(spec.layers))
        if isinstance(heads, AssistantSpec):
            heads.reading(spec)
        return
    draft = read_config(folder)
    spec = supported_spec(draft)
    check_draft_model(folder, spec)
    check_checkpoint(draft, spec)
    own = tokenizer_json(settings.tokenizer_path, None, settings.trust_remote_code)
    other = tokenizer_json(folder, None, settings.trust_remote_code)
    if (difference := find_difference(own, other)) is not None:
        raise ConfigurationError(
            f"--draft-model {folder} has another tokenizer than the model: {difference}. Its "
            "tokens would be drafts of other texts; name a smaller model of the same family"
        )


def _check_own_layers(config: ModelConfig) -> None:
    """Raise for layers of the model's own that cannot draft."""
    spec = model_spec(config)
    if isinstance(spec, DecoderSpec):  # what has such layers is no other model
        need_mtp(config, spec)


def _check_adapters(settings: Settings, config: ModelConfig) -> list[str]:
    """Raise for adapters that cannot be served.

    Their headers are read, and some rows of matrices that they save whole.
    """
    keyed = settings.api_key or settings.api_key_file
    if settings.adapter_updates and not (keyed and settings.adapter_folder):
        raise ConfigurationError(
            "`adapter_updates` lets clients name files to load: it needs `api_key` (or "
            "`api_key_file`) and `adapter_folder`, below which those files are"
        )
    spec = model_spec(config)
    if not isinstance(spec, DecoderSpec):
        raise ConfigurationError(
            f"--lora-adapters and --adapter-updates: of {settings.model_type} models no linears "
            "are known by name, or there is an encoder; merge an adapter into its base by giving "
            "its folder to --model-id"
        )
    vocabulary = _own_vocabulary(settings, config)
    taken = {settings.model_id, *settings.served_model_names}
    warnings = []
    for name, folder in settings.adapter_folders.items():
        if name in taken or names_base(name):
            raise ConfigurationError(
                f"--lora-adapters: `{name}` is a name of the model itself; give another one, as "
                f"NAME={folder}"
            )
        adapter = read_adapter(Path(folder))
        changes = map_adapter(adapter, spec, settings.max_lora_rank)
        check_saved(adapter, changes, config, spec, settings.max_lora_rank)
        if vocabulary is not None:
            _check_texts(name, Path(folder), vocabulary)
        base = adapter.config.base
        if base and base not in taken and Path(base).name != Path(settings.model_id).name:
            warnings.append(f"the adapter {name} says that it was made for {base}")
    return warnings


def _own_vocabulary(settings: Settings, config: ModelConfig) -> ModelVocabulary | None:
    """Return what the tokenizers of adapters are compared with; None where they are not used."""
    if settings.adapter_tokenizers != OWN:
        return None
    file = tokenizer_json(settings.tokenizer_path, None, settings.trust_remote_code)
    return ModelVocabulary(file, config.vocab_size)


def _check_texts(name: str, folder: Path, vocabulary: ModelVocabulary) -> None:
    """Raise ModelLoadError for a tokenizer or a chat template of an adapter that is not served."""
    try:
        files = read_own_files(folder, vocabulary)
        if files is not None and files.config.chat_templates:
            from tgi_trio.router.text.chat_template import ChatTemplate  # its engine: 50 ms

            ChatTemplate(files.config.chat_templates, files.config.special_tokens)
    except TgiTrioError as error:
        raise ModelLoadError(f"--lora-adapters: `{name}`: {error}") from error


def _check_tokenizer(settings: Settings) -> None:
    """Raise for a tokenizer whose files are damaged, and for a --chat-template that is."""
    folder = settings.tokenizer_path
    check_tokenizer_json(tokenizer_json(folder, None, settings.trust_remote_code))
    read_tokenizer_config(folder, settings.tokenizer_config_path)
    if settings.chat_template is not None:
        from tgi_trio.router.text.chat_template import ChatTemplate  # its engine: 50 ms

        ChatTemplate.from_flag(settings.chat_template, {})
