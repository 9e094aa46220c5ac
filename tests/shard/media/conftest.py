"""Models with images, made once for a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.shard.media.images_support import Golden, Maker, Model, make_folder
from tgi_trio.model.config import read_config
from tgi_trio.model.image_rules import image_rules
from tgi_trio.shard.media.tower import load_tower


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    made: dict[str, Model] = {}

    def make(family: str, **text: Any) -> Model:
        if (name := repr((family, text))) not in made:
            folder = make_folder(tmp_path_factory.mktemp(family), family, **text)
            config, device = read_config(folder), torch.device("cpu")
            tower = load_tower(folder, config.model_type, device, torch.float32)
            rules = image_rules(config)
            made[name] = Model(family, folder, Golden(folder), tower, rules)
        return made[name]

    return make
