"""Specs of models: numbers and kinds, without weights or names of any backend."""
