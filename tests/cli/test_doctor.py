"""`doctor`: findings, cures and the exit code."""

from __future__ import annotations

import importlib.metadata
import io
import os
import socket
from pathlib import Path

import huggingface_hub
import pytest

from tgi_trio.cli import doctor
from tgi_trio.cli.options import DoctorOptions


def test_a_machine_that_runs_these_tests_can_serve() -> None:
    output = io.StringIO()
    assert doctor.doctor(DoctorOptions(port=0), output) == 0
    lines = output.getvalue().splitlines()
    assert lines[-1] == "ready to serve"
    assert any(line.startswith("ok") and "torch" in line for line in lines)
    assert any("memory fence" in line for line in lines)


def test_a_busy_port_is_told_with_its_cure() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        finding = doctor._port(other.getsockname()[1])
    assert finding.verdict is doctor.FindingVerdict.POOR
    assert "--port" in finding.cure


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("#!/bin/sh\nexec sleep 60\n", "nvidia-smi has not answered for 0.05 s"),
        ("#!/no/such/shell\n", "nvidia-smi cannot be run: No such file or directory"),
        ("#!/bin/sh\necho no devices >&2; exit 9\n", "no devices"),
    ],
)
def test_a_driver_that_does_not_answer_is_told_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, found: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(script)
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if "sleep" in script:
        monkeypatch.setattr(doctor, "_DRIVER_SECONDS", 0.05)
    finding = doctor._accelerator()
    assert (finding.verdict, finding.found) == (doctor.FindingVerdict.POOR, found)
    assert "look at the driver" in finding.cure


def test_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("no-such-package",))
    output = io.StringIO()
    assert doctor.doctor(DoctorOptions(port=0), output) == 1
    assert "pip install 'no-such-package'" in output.getvalue()
    assert "keep the server from serving" in output.getvalue()


@pytest.mark.parametrize("found", ["2.8.0", "2.9.1+cu128", "2.13.0", "3.0.0a1"])
def test_a_package_that_is_too_old_fails(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    needed = ["torch>=9; extra == 'later'", "torch>=2.9"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    finding = doctor._package("torch")
    if found == "2.8.0":
        assert finding.verdict is doctor.FindingVerdict.BAD
        assert finding.found == "2.8.0, which is not >=2.9"
        assert finding.cure == "pip install 'torch>=2.9'"
    else:
        assert finding.verdict is doctor.FindingVerdict.GOOD and finding.found == found


def test_all_packages_of_the_report_are_required() -> None:
    for name in doctor._PACKAGES:
        assert doctor._find_requirement(name), name


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN"])
def test_every_name_of_a_token_is_known(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "without a token" in doctor._hub().found
    monkeypatch.setenv(name, "secret")
    assert "with a token" in doctor._hub().found


def test_few_descriptors_and_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_DESCRIPTORS", 2**62)
    monkeypatch.setattr(doctor, "_SHM", 2**62)
    assert doctor._descriptors().verdict is doctor.FindingVerdict.POOR
    assert "ulimit" in doctor._descriptors().cure
    assert "shm-size" in doctor._shared_memory().cure
