"""Vision: computes images' features with a model's vision tower, and caches them by content."""
