"""The Helm chart, rendered by Helm's own code and held to Kubernetes' schemas: `make test-chart`.

No cluster is at hand: what a scheduler, a volume or a network would make of it is not tried.
"""

import importlib
import json
from pathlib import Path

import pytest
import yaml

from flwr_distill.fleet.run_config import read_run_config
from flwr_distill.flower.own_app import PRESETS
from flwr_distill.node.settings import NodeSettings
from flwr_distill.server.settings import RunSettings

helm = pytest.importorskip("helm_python", reason="Helm's code is not installed: make test-chart")
CHART = Path(__file__).resolve().parents[2] / "docker" / "chart"
VERSIONS = ("1.28.0", "1.33.0", "1.37.0")
"""Of Kubernetes: the oldest that Chart.yaml allows, and the newest whose schemas are at hand."""
NODES = [
    {
        "name": "ward-3",
        "secret": "ward-3-files",
        "gpus": 2,
        "data": {"persistentVolumeClaim": {"claimName": "images", "readOnly": True}},
        "settings": {"sector": 1, "log-level": "DEBUG"},
        "nodeSelector": {"kubernetes.io/hostname": "gpu-7"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
    {"name": "ward-4", "secret": "ward-4-files"},
]
RUN = {"name": "second", "config": {"strategy": "fedhead", "num-rounds": 20, "train.lr": 0.1}}
FULL = {"nodes": NODES, "run": RUN}
ADDRESS = {"enabled": False, "address": "fl.example.org:9093"}
ELSEWHERE = {"superlink": {**ADDRESS, "cidrs": ["203.0.113.7/32"]}, "nodes": NODES}
OUTSIDE = {**FULL, "superlink": {"serviceType": "LoadBalancer", "gpus": 1, "storageClass": "fast"}}


def render(values):
    """Objects by kind and name."""
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(chart.merge_values(values))
        texts = chart.render(values, name="fl", namespace="federation").values()
    findings = [each for text in texts for each in yaml.safe_load_all(text) if each]
    assert len({(each["kind"], each["metadata"]["name"]) for each in findings}) == len(findings)
    return {(each["kind"], each["metadata"]["name"]): each for each in findings}


def pods(objects):
    """Pod templates by the name of what makes them."""
    return {
        name: each["spec"]["template"]
        for (kind, name), each in objects.items()
        if kind in ("StatefulSet", "Deployment", "Job")
    }


def containers(objects):
    return [each for pod in pods(objects).values() for each in pod["spec"]["containers"]]


def test_helm_finds_nothing_wrong():
    findings = helm.lint(str(CHART))
    assert findings["errors"] == []
    assert {each["error"] for each in findings["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [{}, FULL, ELSEWHERE, OUTSIDE], ids=range(4))
def test_kubernetes_knows_every_field(values, version):
    kubernetes = importlib.import_module("kubernetes_validate")
    for each in render(values).values():
        kubernetes.validate(each, version, strict=True)


@pytest.mark.parametrize("values", [FULL, ELSEWHERE, OUTSIDE], ids=range(3))
def test_every_pod_is_confined_and_no_secret_is_in_the_chart(values):
    objects = render(values)
    assert not [name for kind, name in objects if kind == "Secret"]
    for pod in (pod["spec"] for pod in pods(objects).values()):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert "memory" in container["resources"]["limits"]
            secrets = {v["name"] for v in pod["volumes"] if "secret" in v}
            mounts = [m for m in container["volumeMounts"] if m["name"] in secrets]
            assert all(mount["readOnly"] for mount in mounts)
            volumes = {volume["name"] for volume in pod["volumes"]} | {"state", "runs"}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_each_node_has_its_own_files_volume_and_gpus():
    objects = render(FULL)
    for node in NODES:
        name = f"fl-{node['name']}"
        spec = pods(objects)[name]["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["certs"]["secret"]["secretName"] == node["secret"]
        assert volumes["state"]["persistentVolumeClaim"]["claimName"] == name
        keep = objects["PersistentVolumeClaim", name]["metadata"]["annotations"]
        assert keep == {"helm.sh/resource-policy": "keep"}
        limits = spec["containers"][0]["resources"]["limits"]
        assert limits.get("nvidia.com/gpu", 0) == node.get("gpus", 0)
        assert spec.get("nodeSelector", {}) == node.get("nodeSelector", {})
        assert objects["Deployment", name]["spec"]["strategy"] == {"type": "Recreate"}


def test_a_nodes_settings_are_those_of_flwr_distill_node(tmp_path):
    objects = render(FULL)
    for node, device in zip(NODES, ("cuda", "cpu"), strict=True):
        text = objects["ConfigMap", f"fl-{node['name']}"]["data"]["node.yaml"]
        given = {key.replace("-", "_"): value for key, value in yaml.safe_load(text).items()}
        names = ("root_certificates", "peer_authority", "peer_certificate", "peer_key", "auth_key")
        for name in names:
            given[name] = tmp_path / name
            given[name].touch()
        if "data" in node:
            assert given["data"] == "/data"
            given["data"] = tmp_path
        settings = NodeSettings(**given)
        assert settings.superlink == "superlink:9092"
        assert settings.peer_address == f"fl-{node['name']}:9200"
        assert (settings.name, settings.device) == (node["name"], device)
        assert settings.sector == node.get("settings", {}).get("sector")


def test_a_run_is_a_job_with_the_settings_that_were_given():
    job = render(FULL)["Job", "fl-run-second"]
    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    given = [a.removeprefix("--run-config=") for a in arguments if a.startswith("--run-config=")]
    config = {key: value for text in given for key, value in read_run_config(text).items()}
    assert config == {**RUN["config"], "runs-dir": "/runs", "min-nodes": 2}
    assert RunSettings.from_run_config(config).train.lr == 0.1
    assert job["spec"]["backoffLimit"] == 0


def test_any_preset_can_be_a_job():
    for file in sorted(PRESETS.glob("*.toml")):
        config = read_run_config(str(file))
        objects = render({"run": {"config": config}})
        arguments = pods(objects)["fl-run-first"]["spec"]["containers"][0]["args"]
        read = {}
        for text in (a.removeprefix("--run-config=") for a in arguments if "run-config" in a):
            read |= read_run_config(text)
        assert read == {"runs-dir": "/runs", **config}, file


def component(selector):
    return selector.get("matchLabels", {}).get("app.kubernetes.io/component")


def reached(objects):
    """Pairs of who may reach which port of whom, by the network policies for who is reached."""
    findings = set()
    for (kind, _), policy in objects.items():
        if kind != "NetworkPolicy":
            continue
        whom = policy["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/component")
        for rule in policy["spec"].get("ingress", ()):
            ports = {port["port"] for port in rule["ports"]}
            for peer in rule.get("from", [{}]):
                pod = peer.get("podSelector", {}).get("matchLabels", {})
                who = pod.get("app.kubernetes.io/component", "monitoring" if peer else "anyone")
                findings |= {(who, whom, port) for port in ports}
    return findings


def test_nobody_reaches_what_is_not_named():
    nodes = {("node", "node", "peer"), ("monitoring", "node", "metrics")}
    server = {("run", "superlink", "control"), ("serverapp", "superlink", "appio")}
    server |= {("monitoring", "serverapp", "metrics")}
    assert reached(render(FULL)) == nodes | server | {("node", "superlink", "fleet")}
    assert reached(render(OUTSIDE)) == nodes | server | {("anyone", "superlink", "fleet")}
    assert reached(render(ELSEWHERE)) == nodes
    nothing = render(FULL)["NetworkPolicy", "fl-nothing"]["spec"]
    assert nothing["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in nothing
    assert {port["port"] for rule in nothing["egress"] for port in rule["ports"]} == {53}


def goes_out(objects):
    """Pairs of who may open a connection to which port of what, by the network policies."""
    findings = set()
    for (kind, _), policy in objects.items():
        if kind != "NetworkPolicy":
            continue
        who = component(policy["spec"]["podSelector"]) or "all"
        for rule in policy["spec"].get("egress", ()):
            for peer in rule["to"]:  # a rule without is for any address
                pod = component(peer.get("podSelector", {}))
                to = pod or json.dumps(peer, sort_keys=True)
                findings |= {(who, to, port["port"]) for port in rule["ports"]}
    return findings


def test_no_pod_opens_a_connection_to_any_address():
    resolver = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
    names = {("all", json.dumps(resolver, sort_keys=True), 53)}
    peers = names | {("node", "node", "peer")}
    inside = {("node", "superlink", "fleet"), ("serverapp", "superlink", "appio")}
    inside |= {("run", "superlink", "control")}
    assert goes_out(render(FULL)) == goes_out(render(OUTSIDE)) == peers | inside
    there = json.dumps({"ipBlock": {"cidr": "203.0.113.7/32"}})
    assert goes_out(render(ELSEWHERE)) == peers | {("node", there, 9093)}
    cache = {"ipBlock": {"cidr": "169.254.20.10/32"}}
    cached = render({"networkPolicy": {"dns": [cache]}})
    assert ("all", json.dumps(cache), 53) in goes_out(cached)


def test_serverapps_are_in_a_pod_of_their_own_without_the_superlinks_key_and_state():
    objects = render(OUTSIDE)
    assert objects["Service", "control"]["spec"]["type"] == "ClusterIP"
    (superlink,) = pods(objects)["superlink"]["spec"]["containers"]
    assert "--serverappio-api-address=0.0.0.0:9091" in superlink["args"]
    spec = pods(objects)["serverapp"]["spec"]
    (serverapp,) = spec["containers"]
    assert "--appio-api-address=control:9091" in serverapp["args"]
    assert serverapp["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in superlink["resources"]["limits"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["certs"]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert volumes.keys() == {"certs", "appio", "runs", "spool", "tmp"}
    claims = objects["StatefulSet", "superlink"]["spec"]["volumeClaimTemplates"]
    assert [claim["metadata"]["name"] for claim in claims] == ["state"]


def test_one_service_leads_serverapps_to_their_port_under_a_name_of_the_certificate():
    ports = render(FULL)["Service", "control"]["spec"]["ports"]
    assert {port["name"]: port["port"] for port in ports} == {"control": 9093, "appio": 9091}


def test_prometheus_finds_the_ports_of_metrics():
    for name, pod in pods(render(FULL)).items():
        if "-run-" in name or name == "superlink":
            continue
        port = pod["metadata"]["annotations"]["prometheus.io/port"]
        named = [p for c in pod["spec"]["containers"] for p in c["ports"] if p["name"] == "metrics"]
        assert [str(each["containerPort"]) for each in named] == [port]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"nodes": [{"name": "Ward 3", "secret": "x"}]}, "name"),
        ({"nodes": [{"name": "ward-3"}]}, "secret"),
        ({"nodes": [{"name": "ward-3", "secret": "x", "gpus": -1}]}, "gpus"),
        ({"superlnk": {}}, "superlnk"),
        ({"superlink": {"enabled": False}}, r"superlink\.address"),
        ({**ELSEWHERE, "run": RUN}, r"run\.config"),
        ({"superlink": ADDRESS, "nodes": NODES}, r"superlink\.cidrs"),
        ({"superlink": {**ADDRESS, "cidrs": ["fl.example.org"]}}, "cidrs"),
        ({"networkPolicy": {"dns": []}}, "dns"),
        ({"networkPolicy": {"dns": [{}]}}, "dns"),
    ],
)
def test_wrong_values_are_refused_by_name(values, named):
    with pytest.raises(helm.HelmError, match=named):
        render(values)
