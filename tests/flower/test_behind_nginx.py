"""A SuperLink over HTTP behind a real nginx with docker/gate/nginx-http.conf."""

import shutil
import subprocess
from contextlib import ExitStack

import httpx
import pytest

from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.local_federation import free_ports
from flwr_distill.fleet.servers import Addresses
from flwr_distill.node.stock import FLEET_OVER_HTTP, installed_line

from .conftest import ROOT
from .machines import Machines

RUN = 'strategy="fedavg" num-rounds=1 min-nodes=2'


def configuration(folder, port, superlink):
    """The published file with the paths, ports and names of a test."""
    text = (ROOT / "docker" / "gate" / "nginx-http.conf").read_text()
    for here, there in (
        ("/tmp/", f"{folder}/"),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("superlink:8000", superlink),
        ("proxy_ssl_name superlink", "proxy_ssl_name localhost"),
        ("/gate/server", str(folder / "public-certs" / "server")),
        ("/gate/public", str(folder / "certs")),
        ("/dev/stdout", f"{folder}/access.log"),
    ):
        assert here in text, here
        text = text.replace(here, there)
    file = folder / "nginx.conf"
    file.write_text(text)
    return file


@pytest.mark.deployment("behind nginx: one port, TLS there, system certificates")
@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
@pytest.mark.skipif(
    installed_line() < FLEET_OVER_HTTP, reason="its APIs are gRPC: docker/gate/nginx.conf"
)
def test_nodes_and_users_come_through_nginx_and_others_get_no_further(tmp_path):
    port, _, own = free_ports(3)
    inside = Addresses.beside(f"127.0.0.1:{own}", own, own)
    outside = f"localhost:{port}"
    with ExitStack() as processes:
        machines = Machines(tmp_path, processes)
        for words in (
            ("init",),
            ("server", "--host", "localhost", "--host", "127.0.0.1"),
            ("node", "ward-1"),
            ("node", "ward-2"),
        ):
            assert machines.do("certs", *words)[0] == 0, words
        public = CertificateFolder(tmp_path / "public-certs")
        public.create(30)
        public.issue_server(["localhost"], 10)
        conf = configuration(tmp_path, port, inside.fleet)
        subprocess.run(["nginx", "-t", "-q", "-c", str(conf)], check=True)
        machines.start("nginx", "-c", str(conf), "-g", "daemon off;", program=("nginx",))
        machines.start_superlink(inside)
        code, output = machines.do("register", "--superlink", inside.control)
        assert (code, output.count(": registered")) == (0, 2), output
        machines.env["SSL_CERT_FILE"] = str(public.certificate)  # what this machine trusts
        for place, name in enumerate(("ward-1", "ward-2")):
            machines.start(
                name,
                *("node", "--superlink", outside, "--auth-key", f"certs/{name}/login.key"),
                *("--partition-id", str(place), "--num-partitions", "2", "--policy", "open"),
                *("--state-dir", f"state/{name}", "--device", "cpu"),
            )
        where = ("--superlink", outside, "--root-certificates", str(public.certificate))
        code, output = machines.do("run", *where, "-c", RUN)
        assert code == 0, output
        trusted = httpx.create_ssl_context(verify=str(public.certificate))
        for path in ("/", "/v1/runtime/pull-task-input", "/docs"):
            answer = httpx.post(f"https://{outside}{path}", verify=trusted)
            assert answer.status_code == 403, (path, answer.text)
        elsewhere = httpx.HTTPTransport(verify=trusted, local_address="127.0.0.2")
        with httpx.Client(transport=elsewhere) as user:
            assert user.post(f"https://{outside}/v1/control/list-runs").status_code == 403
            assert user.post(f"https://{outside}/v1/fleet/pull-messages").status_code != 403
    seen = (tmp_path / "access.log").read_text()
    assert "POST /v1/fleet/" in seen
    assert "POST /v1/control/start-run" in seen
