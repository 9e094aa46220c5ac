"""Layers that keep a state per sequence: their slots, and what a step reads and writes of them."""
