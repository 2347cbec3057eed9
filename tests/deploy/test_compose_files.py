"""The compose files are sound, alone and together, and what they start is confined."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from flwr_distill import ROOMS
from flwr_distill.node.metrics import NodeMetrics
from flwr_distill.server.record.metrics import RunMetrics

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("docker/gpu.yaml", "docker/monitoring.yaml", "docker/gate.yaml")
TOGETHER = [
    ("compose.yaml", *chosen)
    for count in range(len(OVERLAYS) + 1)
    for chosen in combinations(OVERLAYS, count)
]


def has_compose():
    if shutil.which("docker") is None:
        return False
    return not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode


def config(*files):
    """What `docker compose` makes of files, or its complaint."""
    chosen = [argument for file in files for argument in ("--file", str(ROOT / file))]
    done = subprocess.run(
        ["docker", "compose", *chosen, "config"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def read(file):
    return yaml.safe_load((ROOT / file).read_text())


@pytest.mark.skipif(not has_compose(), reason="`docker compose` is not installed")
@pytest.mark.parametrize("files", [*TOGETHER, ("docker/node.yaml",)], ids=" ".join)
def test_docker_compose_takes_every_combination_of_files(files):
    services = config(*files)["services"]
    assert {"node-0", "superlink"} <= services.keys() or "node" in services


def test_the_image_has_what_the_project_needs_with_partitions_and_without_simulations(tmp_path):
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    (command,) = re.findall(r"^RUN (python -c .*?requirements\.txt)", dockerfile, re.M | re.S)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    environment = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=True)
    findings = (tmp_path / "requirements.txt").read_text().splitlines()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = settings["project"]["optional-dependencies"]
    needed = list(settings["project"]["dependencies"])
    for extra in ("dicom", "parquet", "partitions", "tiff"):
        needed += extras[extra]
    assert sorted(findings) == sorted([*needed, *settings["build-system"]["requires"]])


def test_the_base_image_is_pinned_by_the_same_digest_everywhere():
    (default,) = re.findall(
        r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE
    )
    assert re.fullmatch(r"[a-z.:0-9-]+@sha256:[0-9a-f]{64}", default)
    arguments = read("compose.yaml")["x-hardened"]["build"]["args"]
    assert arguments["PYTHON_IMAGE"] == f"${{PYTHON_IMAGE:-{default}}}"


@pytest.mark.parametrize("file", ["compose.yaml", "docker/node.yaml"])
def test_every_container_of_ours_is_confined(file):
    for name, service in read(file)["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        if name == "prepare":  # gives volumes away, and can do no more than that
            assert (service["cap_add"], service["network_mode"]) == (["CHOWN"], "none")
        else:
            assert "cap_add" not in service, name
            assert service.get("user") in (None, "${NODE_USER:-1000:1000}"), name


def test_the_image_runs_as_a_user_without_rights():
    lines = (ROOT / "docker/Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER flwr"]


@pytest.mark.parametrize("file", ["compose.yaml", "docker/monitoring.yaml"])
def test_ports_are_published_on_loopback_unless_asked(file):
    services = read(file)["services"].values()
    published = [port for service in services for port in service.get("ports", [])]
    assert published
    for port in published:
        assert port.startswith(("127.0.0.1:", "${FLEET_ADDRESS:-127.0.0.1}:9092:"))
    assert not any(":9091" in port for port in published)


def test_nodes_are_not_on_the_network_of_the_apis_without_authentication():
    services = read("compose.yaml")["services"]
    command = services["superlink"]["command"]
    assert "--control-api-address control:9093" in command
    assert services["superlink"]["networks"]["control"] == {"aliases": ["control"]}
    assert services["superlink"]["networks"]["fleet"] == {}
    nodes = [service for name, service in services.items() if name.startswith("node-")]
    assert [node["networks"] for node in nodes] == [["fleet"]] * 4


def test_no_network_of_a_node_or_a_serverapp_has_a_way_out():
    """Together with the files that go over compose.yaml; and no node publishes a port."""
    files = [read(file) for file in ("compose.yaml", *OVERLAYS)]
    networks = {name: of for file in files for name, of in file.get("networks", {}).items()}
    nodes = [
        service
        for file in files
        for name, service in file["services"].items()
        if name.startswith("node-")
    ]
    used = {network for node in nodes for network in node.get("networks", [])}
    assert used == {"fleet", "monitoring"}
    used.add("serverapps")
    no_way_out = {
        "internal": True,
        "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"},
    }
    assert all(networks[name] == no_way_out for name in used)
    assert not any(node.keys() & {"ports", "network_mode", "extra_hosts"} for node in nodes)


def test_ports_are_published_from_a_network_that_has_a_way_in():
    files = [read(file) for file in ("compose.yaml", *OVERLAYS)]
    networks = {name: of for file in files for name, of in file.get("networks", {}).items()}
    publishing = [s for file in files for s in file["services"].values() if "ports" in s]
    assert len(publishing) == 4
    for service in publishing:
        assert networks[min(service["networks"])] is None  # the first, by name


@pytest.mark.parametrize("file", ["compose.yaml", "docker/node.yaml", "docker/monitoring.yaml"])
def test_every_container_has_limits_of_memory_and_processes(file):
    for name, service in read(file)["services"].items():
        if "image" in service:  # else it changes one of another file
            assert service["mem_limit"], name
            assert service["pids_limit"], name


def test_the_servers_key_is_where_the_server_listens():
    """And where it is made."""
    services = read("compose.yaml")["services"]
    holders = {
        name
        for name, service in services.items()
        if any(str(volume).startswith("server:") for volume in service.get("volumes", []))
    }
    assert holders == {"prepare", "certs", "superlink"}


def test_tasks_of_serverapps_are_claimed_with_a_secret_that_others_do_not_have():
    services = read("compose.yaml")["services"]
    of_superlink, of_executor = services["superlink"], services["serverapp"]
    for service in (of_superlink, of_executor):
        assert "--superexec-auth-secret-file /appio/secret" in service["command"]
        assert "appio:/appio:ro" in service["volumes"]
    others = [service for service in services.values() if "appio:/appio:ro" in str(service)]
    assert others == [of_superlink, of_executor]


def test_what_nodes_send_is_spooled_to_a_disk():
    executor = read("compose.yaml")["services"]["serverapp"]
    assert executor["environment"]["TMPDIR"] == "/spool"
    assert "spool:/spool" in executor["volumes"]
    assert not any(tmpfs.startswith("/spool") for tmpfs in executor["tmpfs"])


def test_every_volume_is_given_to_the_user_that_containers_run_as():
    """Docker makes new volumes as root."""
    compose = read("compose.yaml")
    prepared = {volume.partition(":")[0] for volume in compose["services"]["prepare"]["volumes"]}
    made_by_the_image = {"superlink"}
    assert compose["volumes"].keys() - made_by_the_image <= prepared


def test_nodes_on_gpus_ask_for_none_in_particular():
    """So that a machine with one is enough; `node.device` spreads them over what there is."""
    nodes = {name for name in read("compose.yaml")["services"] if name.startswith("node-")}
    services = read("docker/gpu.yaml")["services"]
    assert services.keys() == nodes
    for name, service in services.items():
        (requests,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert requests == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}, name
        assert service["environment"]["FLWR_DISTILL_DEVICE"] == "cuda", name
        seen = service["environment"]["CUDA_VISIBLE_DEVICES"]
        assert seen == "${GPUS:-0,1,2,3,4,5,6,7}", name


def test_every_node_has_its_own_partition_key_and_volume():
    services = read("compose.yaml")["services"]
    nodes = {name: service for name, service in services.items() if name.startswith("node-")}
    for number, (name, node) in enumerate(sorted(nodes.items())):
        assert name == f"node-{number}"
        assert node["volumes"] == [f"{name}:/node"]
        assert node["environment"]["FLWR_DISTILL_PARTITION_ID"] == number
        assert node["environment"]["FLWR_DISTILL_NUM_PARTITIONS"] == len(nodes)
        assert node["environment"]["FLWR_DISTILL_PEER_ADDRESS"] == f"{name}:9200"
        assert f"{name}:/certs/{name}" in services["certs"]["volumes"]
    assert f"min-nodes={len(nodes)}" in " ".join(services["run"]["command"])


def test_prometheus_asks_everyone_that_is_told_to_answer():
    services = read("docker/monitoring.yaml")["services"]
    answering = {
        f"{name}:{port}"
        for name, service in services.items()
        if (port := service.get("environment", {}).get("FLWR_DISTILL_METRICS_PORT"))
    }
    jobs = read("docker/monitoring/prometheus.yaml")["scrape_configs"]
    groups = [group for job in jobs for group in job["static_configs"]]
    requests = {target for group in groups for target in group["targets"]}
    assert requests == answering
    assert len(requests) == 5


def test_the_dashboard_asks_for_numbers_that_there_are(tmp_path):
    row = {"round": 1, "accuracy": 0.5, "loss": 1, "node_accuracy": 0.5}
    row |= {"server_bytes": 1, "link_bytes": 1}
    phase = {"phase": "train", "seconds": 1, "asked": 1, "nodes": {"7": {}}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "journal.jsonl").write_text(json.dumps(phase) + "\n")
    registry = CollectorRegistry()
    registry.register(RunMetrics(tmp_path))
    registry.register(NodeMetrics({"starts": 1}))
    lines = generate_latest(registry).decode().splitlines()
    there = {line.partition("{")[0].partition(" ")[0] for line in lines if line[0] != "#"}
    dashboard = json.loads((ROOT / "docker/monitoring/dashboard.json").read_text())
    requests = " ".join(
        target["expr"] for panel in dashboard["panels"] for target in panel["targets"]
    )
    assert set(re.findall(r"flwr_distill_\w+", requests)) <= there


def test_the_image_gets_every_package_that_is_installed():
    stored = (ROOT / ".dockerignore").read_text().splitlines()
    assert [
        room for room in ("baselines", "flwr_distill", *ROOMS) if f"!{room}" not in stored
    ] == []
