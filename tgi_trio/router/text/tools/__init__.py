"""Tool calls: what a request allows, the grammar that enforces it, the parser of its calls.

request ── functions.py ──────▶ ToolUse ─┬─▶ call_rules.py: what the model may write, for the shard
template ── call_formats.py ──▶ Format ──┴─▶ call_parser.py: what it wrote, as deltas

A `Format` (`format.py`) is a row of literal texts; rows are in a file per kind (`formats_json.py`
and its siblings). Between those texts are arguments, which the row's `Arguments` write, constrain
and read: `arguments_json.py`, `arguments_xml.py`, `arguments_python.py` and `arguments_gemma.py`.
Only harmony, whose answers are messages, has a reader and rules of its own (`channels.py`). How an
answer begins, up to a format's trigger, is in `text/answer_grammar.py`.
"""
