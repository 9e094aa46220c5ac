"""Grammars for both processes: compiled by llguidance, checked in a child that may die of it."""
