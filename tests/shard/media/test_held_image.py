"""Features of a step, from those of what stands in it."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.media.held_image import place_features
from tgi_trio.shard.media.placed_features import PlacedFeatures


def test_what_adds_nothing_after_layers_stands_beside_what_does() -> None:
    """As sounds beside images of Qwen3-Omni, in either order."""
    sound = PlacedFeatures(np.array([1, 2]), np.full((2, 3), 5, np.float32), {})
    added = {4: np.full((1, 3), 7, np.float32)}
    image = PlacedFeatures(np.array([0]), np.full((1, 3), 6, np.float32), added)
    assert place_features([]) is None
    for parts in ([(0, sound), (3, image)], [(0, image), (1, sound)]):
        found = place_features(parts)
        assert found is not None and list(found.deep) == [4]
        ours = found.rows[:, 0] == 6
        assert (found.deep[4][ours] == 7).all() and (found.deep[4][~ours] == 0).all()
        assert found.places.tolist() == ([1, 2, 3] if parts[0][1] is sound else [0, 2, 3])
