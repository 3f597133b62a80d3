"""The image and the manifests, as far as they can be checked without a container builder and a cluster."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from fnmatch import fnmatch
from typing import Any
from uuid import uuid4

import yaml
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.templating import apply_values, find_placeholders

from tests.docs.documents import ROOT, table_rows

DOCKERFILE = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS = [line for line in DOCKERFILE.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
TEMPLATE: dict[str, Any] = json.loads((ROOT / "deploy" / "kubernetes" / "work-pool.json").read_text())
VARIABLES = TEMPLATE["variables"]["properties"]
POD = TEMPLATE["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
MANIFESTS = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "worker.yaml").read_text()))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IDLE_S = 10  # from SIGTERM until a run has stopped (DESIGN section 2)


def copied() -> list[str]:
    lines = [line.split()[1:-1] for line in INSTRUCTIONS if line.startswith("COPY") and "--from" not in line]
    return [source for sources in lines for source in sources]


def test_what_the_image_copies_is_there_and_nothing_else_is_sent_to_the_builder():
    assert [source for source in copied() if not (ROOT / source).exists()] == []
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied())
    assert any(fnmatch("configs/.env", pattern) for pattern in ignored if pattern.startswith("**"))


def test_the_image_has_all_packages_of_the_project_and_its_entry_files():
    packages = {
        p.removesuffix("*")
        for p in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"][
            "include"
        ]
    }
    assert packages | {"configs", "prefect.yaml", "constraints"} <= set(copied())


def test_the_image_runs_as_no_root_and_pins_what_it_is_made_of():
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.M)
    assert all(re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base) for base in bases)
    (user,) = [line for line in INSTRUCTIONS if line.startswith("USER")]
    assert user == f"USER {POD['securityContext']['runAsUser']}:{POD['securityContext']['runAsGroup']}"
    assert INSTRUCTIONS.index(user) > max(n for n, line in enumerate(INSTRUCTIONS) if line.startswith("RUN"))
    assert "ARG CONSTRAINTS=constraints/cpu.txt" in INSTRUCTIONS
    assert not re.search(r"^(ARG|ENV).*(SECRET|PASSWORD|TOKEN|KEY)", DOCKERFILE, flags=re.M)
    assert not any(line.startswith("ADD") or "sudo" in line or "curl" in line for line in INSTRUCTIONS)


def test_every_placeholder_of_the_template_has_a_variable_and_every_variable_is_used():
    assert {p.name for p in find_placeholders(TEMPLATE["job_configuration"])} == VARIABLES.keys()
    assert {"command", "env", "labels", "name"} <= VARIABLES.keys(), "Prefect fills these in for every kind of worker"
    assert not TEMPLATE["variables"].get("required")


def test_prefect_fills_the_template_in_with_a_deployments_own_values():
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}, "node_selector": {"gpu": "h100"}, "termination_grace_s": 90}
    defaults = {name: variable["default"] for name, variable in VARIABLES.items() if "default" in variable}
    job = apply_values(TEMPLATE["job_configuration"], defaults | gpu)["job_manifest"]["spec"]
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 90
    assert (pod["nodeSelector"], pod["containers"][0]["resources"]) == (gpu["node_selector"], gpu["resources"])
    assert (pod["serviceAccountName"], job["backoffLimit"]) == ("forge-run", 0)
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_prefects_worker_makes_jobs_of_the_template():
    from prefect_kubernetes import worker

    values = {"env": {"FORGE_STORE": "s3://bucket/forge"}}
    make = worker.KubernetesWorkerJobConfiguration.from_template_and_values
    job = asyncio.run(make(base_job_template=TEMPLATE, values=values, client=object()))
    job.prepare_for_flow_run(FlowRun(id=uuid4(), name="a run", flow_id=uuid4()))
    (container,) = job.job_manifest["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["python", "-m", "prefect.engine"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment["FORGE_STORE"] == "s3://bucket/forge"
    assert "PREFECT__FLOW_RUN_ID" in environment


def test_the_template_has_what_prefects_worker_insists_on():
    """prefect-kubernetes 0.7 refuses a job without these values; the kinds of its settings are those of a process."""
    job = TEMPLATE["job_configuration"]["job_manifest"]
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert (POD["parallelism"], POD["completions"], POD["restartPolicy"]) == (1, 1, "Never")
    assert POD["containers"][0]["name"] == "prefect-job"
    settings = {"job_manifest", "cluster_config", "job_watch_timeout_seconds", "pod_watch_timeout_seconds"}
    common = {"command", "env", "labels", "name", "namespace", "stream_output"}
    assert TEMPLATE["job_configuration"].keys() == settings | common


def test_the_flow_itself_is_process_1_of_its_pod_and_gets_the_sigterm():
    """Prefect's default, ``prefect flow-run execute``, ends at once on SIGTERM, and the container with it."""
    assert VARIABLES["command"]["default"] == "python -m prefect.engine"
    assert not any(line.startswith("ENTRYPOINT") for line in INSTRUCTIONS)


def test_pods_get_longer_to_stop_than_a_run_takes_and_secrets_come_from_a_secret():
    grace = VARIABLES["termination_grace_s"]
    assert min(grace["minimum"], grace["default"]) > 2 * IDLE_S
    (container,) = POD["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "{{ secret_name }}"}}]
    mounts, volumes = (
        {v["name"] for v in where["volumeMounts" if "image" in where else "volumes"]} for where in (container, POD)
    )
    assert mounts == volumes == {"shm", "scratch"}
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["automountServiceAccountToken"] is False


def test_the_manifests_fit_together():
    kinds = {(m["kind"], m["metadata"]["name"]): m for m in MANIFESTS}
    worker = kinds["Deployment", "forge-worker-generator"]["spec"]["template"]["spec"]
    assert ("ServiceAccount", worker["serviceAccountName"]) in kinds
    assert ("ServiceAccount", VARIABLES["service_account_name"]["default"]) in kinds
    assert worker["containers"][0]["envFrom"][0]["secretRef"]["name"] == VARIABLES["secret_name"]["default"]
    assert worker["containers"][0]["args"][:5] == ["prefect", "worker", "start", "--pool", "generator"]
    environment = {v["name"].removeprefix("PREFECT_"): v["value"] for v in worker["containers"][0]["env"]}
    kubernetes = "INTEGRATIONS_KUBERNETES"
    namespace = kinds["Role", "forge-worker"]["metadata"]["namespace"]
    assert environment[f"{kubernetes}_OBSERVER_NAMESPACES"] == namespace, "its role is of that namespace alone"
    secret = {key: environment[f"{kubernetes}_WORKER_API_AUTH_STRING_SECRET_{key}"] for key in ("NAME", "KEY")}
    assert secret == {"NAME": VARIABLES["secret_name"]["default"], "KEY": "PREFECT_API_AUTH_STRING"}
    bound = kinds["RoleBinding", "forge-worker"]
    assert [s["name"] for s in bound["subjects"]] == ["forge-worker"], "pods of runs may ask nothing of the cluster"


def test_the_workers_package_is_pinned_to_the_release_that_the_template_was_tried_with():
    texts = [(ROOT / name).read_text() for name in ("docs/kubernetes.md", "deploy/kubernetes/worker.yaml")]
    assert {re.search(r"prefect-kubernetes==([\d.]+)", text)[1] for text in texts} == {"0.7.11"}  # type: ignore[index]


def test_the_document_has_the_variables_and_defaults_of_the_template():
    rows = {row[0].strip("`"): row[1].strip("`") for row in table_rows(ROOT / "docs" / "kubernetes.md", "variable")}
    assert rows.keys() <= VARIABLES.keys()
    for name in ("image", "shared_memory", "scratch", "secret_name", "service_account_name", "termination_grace_s"):
        assert rows[name] == str(VARIABLES[name]["default"])
    assert VARIABLES["image"]["default"] == f"forge:{VERSION}"
