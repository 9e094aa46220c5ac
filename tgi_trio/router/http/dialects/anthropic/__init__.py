"""Anthropic's Messages API, for their SDKs and Claude Code.

schema.py: bodies ── request.py: to a conversation ── answer.py: back to bodies and events
updates.py: what messages change of it; client_tools.py: tools that are named by their type
"""
