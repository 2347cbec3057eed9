"""Our command as a process, and virtual environments with what the one of the tests has."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PROGRAM = (sys.executable, "-P", "-m", "flwr_distill.command")
"""`flwr-distill`, also where it is on the path alone, as with another Flower."""
ROOT = Path(__file__).resolve().parents[1]
BASELINES = ROOT / "baselines"


def flwr_distill(env, *arguments, code=0):
    """Run a command of ours to its end, which is that exit code; what it prints."""
    command = [*PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def project_files():
    """All files of the project, without those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [file for name in listed.stdout.split("\0") if name and (file := ROOT / name).is_file()]


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
