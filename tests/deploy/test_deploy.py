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
from tgi_trio.router.telemetry.metric_table import METRICS
from tgi_trio.settings.records import Options

DEPLOY = Path(__file__).parents[2] / "deploy"
HADOLINT = Path(sys.executable).with_name("hadolint")  # the environment may not be activated
GRACE = Options().graceful_termination_timeout
PATHS = {route.path for route in ROUTES}


def documents(file: str = "kubernetes.yaml") -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / file).read_text()))


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


# Fields of resources that Kubernetes itself does not know, as their definitions have them.
LEADER_WORKER_SET = {
    "spec": {"replicas", "leaderWorkerTemplate"},
    "template": {"size", "restartPolicy", "leaderTemplate", "workerTemplate"},
}
RAY_JOB = {"entrypoint", "shutdownAfterJobFinishes", "rayClusterSpec"}
RAY_HEAD = {"rayStartParams", "template"}
RAY_WORKERS = RAY_HEAD | {"groupName", "replicas", "minReplicas", "maxReplicas"}


def check_pod(template: dict[str, Any]) -> dict[str, Any]:
    """Return a pod's only container; what the pod says is what Kubernetes knows."""
    pod = {"metadata": {"name": "x"}, **template, "apiVersion": "v1", "kind": "Pod"}
    kubernetes_validate.validate(pod, "1.30", strict=True)
    (container,) = pod["spec"]["containers"]
    kept = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= kept
    return dict(container)


def pause_of(container: dict[str, Any]) -> int:
    """Return the seconds that a container sleeps before it is told to stop."""
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    return int(seconds)


def test_leaders_and_ranks_on_kubernetes_fit_each_other() -> None:
    ranks, front, service, fronts = documents("leaderworkerset.yaml")
    for document in (front, service, fronts):
        kubernetes_validate.validate(document, "1.30", strict=True)
    assert ranks["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(ranks["spec"]) == LEADER_WORKER_SET["spec"]
    template = ranks["spec"]["leaderWorkerTemplate"]
    assert set(template) == LEADER_WORKER_SET["template"]
    leader, rank = (check_pod(template[f"{name}Template"]) for name in ("leader", "worker"))
    environ = {item["name"]: item["value"] for item in leader["env"] if "value" in item}
    led = parse(leader["args"], environ).options
    assert led.num_shard == template["size"] == led.remote_ranks + 1
    ports = {each["name"]: each["containerPort"] for each in leader["ports"]}
    assert ports == {"http": led.port, "ranks": int(led.rank_address.rpartition(":")[2])}
    found = {"$(LWS_LEADER_ADDRESS)": "leader.example", "$(LWS_WORKER_INDEX)": "1"}
    words = [word for word in rank["args"]]
    for name, value in found.items():
        words = [word.replace(name, value) for word in words]
    followed = parse(words, {})
    assert followed.command == "rank" and followed.options.rank == 1
    assert followed.options.leader == f"leader.example:{ports['ranks']}"
    assert followed.options.model_id == led.model_id

    drained = pause_of(leader) + led.graceful_termination_timeout
    assert drained < pause_of(rank)
    for each in (f"{name}Template" for name in ("leader", "worker")):
        assert pause_of(rank) < template[each]["spec"]["terminationGracePeriodSeconds"]

    container = check_pod(front["spec"]["template"])
    fronted = parse(container["args"], {}).options
    assert {each["containerPort"] for each in container["ports"]} == {fronted.port}
    name, count = ranks["metadata"]["name"], ranks["spec"]["replicas"]
    assert fronted.replica == tuple(f"{name}-{i}.{name}:{led.port}" for i in range(count))
    (peer,) = fronted.peer
    assert peer == f"{fronts['metadata']['name']}:{fronts['spec']['ports'][0]['port']}"
    labels = front["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == fronts["spec"]["selector"] == labels
    secrets = {each.cluster_secret_file for each in (led, followed.options, fronted)}
    assert len(secrets) == 1 and None not in secrets


def test_a_ray_job_on_kubernetes_fits_the_command() -> None:
    job, service = documents("kuberay.yaml")
    kubernetes_validate.validate(service, "1.30", strict=True)
    assert job["apiVersion"] == "ray.io/v1" and set(job["spec"]) == RAY_JOB
    cluster = job["spec"]["rayClusterSpec"]
    assert set(cluster) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert set(head) == RAY_HEAD and set(workers) == RAY_WORKERS
    here, there = (check_pod(each["template"]) for each in (head, workers))
    python, m, package, *words = job["spec"]["entrypoint"].split()
    assert (python, m, package) == ("python", "-m", "tgi_trio")
    command = parse(words, {})
    assert command.command == "cluster"
    options = command.options
    assert options.replicas == (workers["minReplicas"], workers["maxReplicas"])
    assert int(there["resources"]["limits"]["nvidia.com/gpu"]) == options.replica_gpus
    ports = {each["name"]: each["containerPort"] for each in here["ports"]}
    assert ports["http"] == int(options.front_bind.rpartition(":")[2])
    secret = Path(parse(options.server, {}).options.cluster_secret_file or "")
    for container in (here, there):
        assert str(secret.parent) in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert service["spec"]["selector"] == head["template"]["metadata"]["labels"]


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
