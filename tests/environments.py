"""Virtual environments that share what is installed in the one of the tests."""

import sys
import sysconfig
import venv
from pathlib import Path

PROGRAM = (sys.executable, "-P", "-m", "flwr_distill.command")
"""`flwr-distill`, also where it is on the path alone, as with another Flower."""
BASELINES = Path(__file__).resolve().parents[1] / "baselines"


def shared_environment(environment, *, editable):
    """Make a virtual environment with the packages and programs of this one.

    Parameters
    ----------
    editable : bool
        Whether our own package is among them, that of this checkout; its baselines are anyway.
    """
    venv.create(environment, symlinks=True)
    shared = sysconfig.get_path("purelib")
    own = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    lines = [f"import site; site.addsitedir({shared!r})"] if editable else [shared, str(BASELINES)]
    (own / "shared.pth").write_text("\n".join([*lines, ""]))
    for script in (Path(sys.prefix) / "bin").iterdir():
        here = environment / "bin" / script.name
        if here.exists() or script.is_dir() or (script.name == "flwr-distill" and not editable):
            continue
        content = script.read_bytes()
        if content.startswith(f"#!{sys.prefix}".encode()):
            _, _, code = content.partition(b"\n")
            here.write_bytes(f"#!{environment}/bin/python\n".encode() + code)
            here.chmod(0o755)
        else:
            here.symlink_to(script)
