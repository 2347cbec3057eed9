"""The generated code in the tree is what links.proto says, and travels in the app bundle."""

import sys
from pathlib import Path
from subprocess import run

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("links_pb2.py", "links_pb2.pyi", "links_pb2_grpc.py")


def test_the_generated_code_agrees_with_the_proto(tmp_path):
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    proto = ["-Itypings", "flwr_distill/links/links.proto"]
    run([sys.executable, "-m", "grpc_tools.protoc", *outputs, *proto], cwd=ROOT, check=True)
    folder = tmp_path / "flwr_distill" / "links"
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert made == {name: (ROOT / "links" / name).read_bytes() for name in GENERATED}, (
        "run `make proto`"
    )
