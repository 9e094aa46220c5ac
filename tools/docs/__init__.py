"""Writes into the documents what the code knows: `python -m tools.docs --write`.

A document marks where something goes with `<!-- generated: NAME -->` and `<!-- end -->`; `pages.py`
says what NAME stands for, and which documents are generated as a whole. What is outside of the
markers is written by hand.
"""
