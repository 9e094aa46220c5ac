"""Grammars as both processes need them: compiled by llguidance, and checked in a child that may die
of it.
"""
