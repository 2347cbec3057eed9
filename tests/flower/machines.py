"""Processes of a federation as its parties start them, with what they print in files."""

import os
import subprocess

from benchmarks.flower_federation import OUR_PACKAGES
from flwr_distill.fleet.servers import listening_arguments
from tests.environments import PROGRAM


class Machines:
    """Processes of one folder, and of its address."""

    def __init__(self, folder, processes):
        self.folder, self.processes = folder, processes
        self.env = {**os.environ, **OUR_PACKAGES, "FLWR_HOME": str(folder / "home")}
        self.env |= {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}

    def start(self, name, *words, program=PROGRAM):
        log = (self.folder / f"{name}.log").open("wb")
        process = subprocess.Popen(
            [*program, *words], cwd=self.folder, env=self.env, stdout=log, stderr=log
        )
        self.processes.callback(process.wait)
        self.processes.callback(process.terminate)

    def start_superlink(self, addresses):
        """With TLS, by the certificates of `certs`, and for registered nodes alone."""
        self.start(
            "superlink",
            *("superlink", *listening_arguments(addresses), "--enable-supernode-auth"),
            *("--ssl-ca-certfile", "certs/ca.crt", "--ssl-certfile", "certs/server/server.crt"),
            *("--ssl-keyfile", "certs/server/server.key"),
            "--disable-runtime-dependency-installation",
        )

    def do(self, *words):
        done = subprocess.run(
            [*PROGRAM, *words],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        logs = "".join(file.read_text()[-2000:] for file in self.folder.glob("*.log"))
        return done.returncode, f"{done.stdout}{done.stderr}{logs if done.returncode else ''}"

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()
