"""Pixels become features: a model's vision tower, and what it has made of images, by content."""
