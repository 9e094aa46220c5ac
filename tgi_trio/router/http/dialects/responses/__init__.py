"""OpenAI's Responses API, for their newer SDKs and Codex. Nothing is stored.

schema.py: bodies ─┬─ tools.py ────▶ what can be called ─┬─▶ request.py: to a conversation
                   └─ items.py ────▶ turns ──────────────┘
writing.py: a response and its items ──▶ answer.py: bodies and events; replies.py has them as types
"""
