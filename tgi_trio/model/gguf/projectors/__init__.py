"""Projectors of llama.cpp (`mmproj-*.gguf`): the tower of a model that sees, beside its text."""
