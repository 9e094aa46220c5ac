"""OpenAI's Responses API, for their newer SDKs and Codex.

schema.py: bodies ─┬─ tools.py ──────▶ what can be called ────────┬─▶ request.py: to a conversation
                   └─ history.py ─▶ all items ─▶ items.py: turns ─┘
updates.py: what items change of the tools, the effort and the form
writing.py: a response and its items ──▶ answer.py: bodies and events; replies.py has them as types
history.py ◀──▶ ../../response_store.py: what later requests can go on from
"""
