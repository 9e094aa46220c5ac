"""The files for systemd, Docker, Kubernetes and Grafana: linted, and true to the server."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tgi_trio.cli.parser import parse
from tgi_trio.router.http.app import ROUTES
from tgi_trio.router.telemetry.metrics import METRICS
from tgi_trio.settings.records import Options

DEPLOY = Path(__file__).parents[2] / "deploy"
HADOLINT = Path(sys.executable).with_name("hadolint")  # the environment may not be activated
GRACE = Options().graceful_termination_timeout
PATHS = {route.path for route in ROUTES}


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_the_manifest_is_valid_kubernetes() -> None:
    for document in documents():
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_the_manifest_fits_the_server() -> None:
    deployment, service, _ = documents()
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    options = parse(container["args"], {}).options
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > options.graceful_termination_timeout + pause
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in PATHS
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    environ = {item["name"]: item.get("value", "x") for item in container["env"]}
    assert parse([], environ).options.port == container["ports"][0]["containerPort"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_dockerfile_passes_its_linter() -> None:
    done = subprocess.run(
        [HADOLINT, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_copies_what_exists_and_checks_a_route() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (DEPLOY.parent / name).exists(), name
    assert "'/ready'" in text
    assert "/ready" in PATHS
    assert "STOPSIGNAL SIGTERM" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "tgi-trio.service").read_text()
    # its program is where it is installed, not here
    there = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit, flags=re.MULTILINE)
    path = tmp_path / "tgi-trio.service"
    path.write_text(there)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "tgi-trio.service" not in done.stderr, done.stderr


def test_the_unit_waits_for_the_drain() -> None:
    unit = (DEPLOY / "tgi-trio.service").read_text()
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) > GRACE
    assert "KillMode=mixed" in unit  # SIGTERM to all would kill the shards under the streams
    (words,) = re.findall(r"^ExecStart=\S+ -m tgi_trio (.*)$", unit, re.MULTILINE)
    parse(words.split(), {})


def grafana() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana", DEPLOY / "grafana.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_is_up_to_date() -> None:
    assert (DEPLOY / "grafana.json").read_text() == grafana().text()


def test_the_dashboard_names_metrics_that_exist() -> None:
    known = {metric.name: metric for metric in METRICS}
    for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            for name in re.findall(r"tgi_\w+", target["expr"]):
                base = re.sub(r"_(bucket|count|sum)$", "", name)
                assert name in known or known[base].kind == "histogram", name
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in target["expr"], target
