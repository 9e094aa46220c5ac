"""Adapters that a model brings along: what they change, and what they need room for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.shard.media.granite_models import make_granite
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.files import read_adapter
from tgi_trio.model.adapters.needs import find_needs
from tgi_trio.model.adapters.own_adapters import check_own_adapter, find_own_adapters
from tgi_trio.model.adapters.sites import map_adapter
from tgi_trio.model.config import read_config, read_values
from tgi_trio.model.families.registry import decoder_spec


def test_its_rank_is_no_matter_of_the_flag_and_its_names_may_be_older(tmp_path: Path) -> None:
    folder = make_granite(tmp_path).folder
    values = read_values(folder)
    assert values is not None and find_own_adapters(values, folder) == {"audio": folder}
    assert find_own_adapters(values | {"model_type": "granite"}, folder) == {}
    assert find_own_adapters(values | {"has_lora_adapter": False}, folder) == {}
    spec = decoder_spec(read_config(folder))
    assert spec is not None
    check_own_adapter(folder, spec)
    needs = find_needs([], spec, 2, grows=False, own=[folder])
    assert needs.rank == 4 and not needs.scope.words()
    with pytest.raises(ModelLoadError, match=r"has the rank 4; at most 2 is served"):
        find_needs([folder], spec, 2, grows=False)
    sites = map_adapter(read_adapter(folder), spec).linears.keys()
    assert len(sites) == len(spec.layers)

    file = folder / "adapter_model.safetensors"  # as files of transformers 4 have them
    older = {
        name.replace("model.language_model.", "language_model.model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(older, file)
    assert map_adapter(read_adapter(folder), spec).linears.keys() == sites
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "LOHA"}))
    with pytest.raises(ModelLoadError, match="because of peft_type 'LOHA'"):
        check_own_adapter(folder, spec)
