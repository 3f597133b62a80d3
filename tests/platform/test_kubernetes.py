"""The image and the manifests, as far as they can be checked without a container builder and a cluster."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from typing import Any

import yaml
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
    bound = kinds["RoleBinding", "forge-worker"]
    assert [s["name"] for s in bound["subjects"]] == ["forge-worker"], "pods of runs may ask nothing of the cluster"


def test_the_document_has_the_variables_and_defaults_of_the_template():
    rows = {row[0].strip("`"): row[1].strip("`") for row in table_rows(ROOT / "docs" / "kubernetes.md", "variable")}
    assert rows.keys() <= VARIABLES.keys()
    for name in ("image", "shared_memory", "scratch", "secret_name", "service_account_name", "termination_grace_s"):
        assert rows[name] == str(VARIABLES[name]["default"])
    assert VARIABLES["image"]["default"] == f"forge:{VERSION}"
