"""The environment of `serve`: its own variables, SageMaker's, and TGI's that have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tgi_trio.cli.foreign import IDLE, REFUSED
from tgi_trio.cli.values import read_value

# SageMaker's variable -> our variable. As in TGI's entry point for SageMaker, they are used
# together: a revision belongs to its model.
SAGEMAKER: Final[Mapping[str, str]] = {
    "HF_MODEL_ID": "MODEL_ID",
    "HF_MODEL_REVISION": "REVISION",
    "HF_MODEL_QUANTIZE": "QUANTIZE",
    "HF_MODEL_TRUST_REMOTE_CODE": "TRUST_REMOTE_CODE",
    "SM_NUM_GPUS": "NUM_SHARD",
    "SAGEMAKER_BIND_TO_PORT": "PORT",
}
SAGEMAKER_PORT: Final = "8080"


@dataclass(frozen=True, slots=True)
class Environment:
    """Variables under the names of our flags, and where each value comes from."""

    values: Mapping[str, str]
    origins: Mapping[str, str] = field(default_factory=dict)  # our variable -> the one that is set
    notes: tuple[str, ...] = ()  # for the log

    def get(self, name: str) -> str:
        """Return a variable's text unchanged, "" if it is not set."""
        return self.values.get(name, "") if name else ""

    def source(self, name: str) -> str:
        """Return a variable's name for errors."""
        return f"environment variable {self.origins.get(name, name)}"


def read_environment(environ: Mapping[str, str], model_is_given: bool) -> Environment:
    """Return the environment of `serve`, with SageMaker's variables in place of ours.

    They are used only if HF_MODEL_ID names the model, and neither a flag (`model_is_given`) nor
    MODEL_ID does. Our variables take precedence.
    """
    if not environ.get("HF_MODEL_ID", "").strip():
        return Environment(environ)
    if model_is_given or environ.get("MODEL_ID", "").strip():
        note = "HF_MODEL_ID and what belongs to it are not used: the model is given otherwise"
        return Environment(environ, notes=(note,))
    values, origins = dict(environ), {}
    for theirs, ours in SAGEMAKER.items():
        text = environ.get(theirs, "").strip()
        if text and not environ.get(ours, "").strip():
            values[ours], origins[ours] = text, theirs
    notes = [f"{ours} is taken from {theirs}" for ours, theirs in origins.items()]
    if not values.get("PORT", "").strip():
        values["PORT"] = SAGEMAKER_PORT
        notes.append(f"PORT is {SAGEMAKER_PORT}, where SageMaker looks for a server")
    return Environment(values, origins, tuple(notes))


def idle_notes(given: Mapping[str, list[str]], environ: Environment) -> tuple[str, ...]:
    """Return messages for the log about flags and variables without effect.

    `given`: the texts of each such flag by field name. Raises ValueError for a value that
    text-generation-inference would refuse as well.
    """
    notes = []
    for refused in REFUSED:
        variable = refused.name.replace("-", "_").upper()
        if not refused.env and environ.get(variable).strip():
            notes.append(f"{variable} makes no difference here: {refused.why}")
    for idle in IDLE:
        name = idle.name.replace("-", "_")
        variable = name.upper()
        texts = given.get(name) or []
        source = f"--{idle.name}"
        if not texts and environ.get(variable).strip():
            texts, source = [environ.get(variable)], variable
        for text in texts:
            read_value(idle.kind, source, text)
        if texts:
            notes.append(f"{source} makes no difference here: {idle.why}")
    return tuple(notes)
