"""How each agent is told to use a server of ours: what docs/coding-agents.md says, and no more."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.compat.agents import packages

MODEL: Final = "local-model"


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent."""

    name: str
    function: str  # its tool that runs commands
    route: str  # that it asks
    # (packages, home, server) -> (program and arguments before the question, those behind, env)
    command: Callable[[Path, Path, str], tuple[list[str], list[str], dict[str, str]]]


def _claude(at: Path, home: Path, url: str) -> tuple[list[str], list[str], dict[str, str]]:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "-",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }
    flags = ["--allowedTools", "Bash", "--output-format", "json"]
    return [str(packages.claude(at)), "-p"], flags, environment


def _codex(at: Path, home: Path, url: str) -> tuple[list[str], list[str], dict[str, str]]:
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f"""model = "{MODEL}"
model_provider = "local"
check_for_update_on_startup = false

[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"

[analytics]
enabled = false
""",
        encoding="utf-8",
    )
    return [str(packages.codex(at)), "exec", "--skip-git-repo-check", "--json"], [], {}


def _opencode(at: Path, home: Path, url: str) -> tuple[list[str], list[str], dict[str, str]]:
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True)
    model = {
        "name": MODEL,
        "tool_call": True,
        "reasoning": True,
        "limit": {"context": 65536, "output": 8192},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "tgi-trio",
        "options": {"baseURL": f"{url}/v1", "apiKey": "-"},
        "models": {MODEL: model},
    }
    config = {"provider": {"local": provider}, "model": f"local/{MODEL}"}
    (folder / "opencode.json").write_text(json.dumps(config), encoding="utf-8")
    off = ("OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_AUTOUPDATE")
    before = [str(packages.opencode(at)), "run", "--format", "json"]
    return before, [], dict.fromkeys(off, "1")


AGENTS: Final = {
    agent.name: agent
    for agent in (
        Agent("claude-code", "Bash", "/v1/messages", _claude),
        Agent("codex", "exec_command", "/v1/responses", _codex),
        Agent("opencode", "bash", "/v1/chat/completions", _opencode),
    )
}


def environment(home: Path, more: dict[str, str]) -> dict[str, str]:
    """Return an environment in which an agent finds nothing of the person who runs the tests."""
    return {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "TMPDIR": str(home),
        **more,
    }
