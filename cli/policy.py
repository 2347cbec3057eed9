"""`flwr-distill policy`: a node's policy in words, and its owner's permissions."""

from pathlib import Path
from typing import Annotated

import typer

from flwr_distill.cli.errors import exit_on

policy = typer.Typer(help="Check a node's policy, and allow what it leaves to its owner.")


@policy.command()
def check(
    file: Annotated[str, typer.Argument(help="A policy's YAML file, or standard, open, hospital.")],
) -> None:
    """Check a policy, and describe what a node with it does and refuses.

    Exits with 1 and the wrong key or value if the policy is invalid.
    """
    # Here: imports pydantic.
    from flwr_distill.node.policy import cannot_hold, in_words, read_policy
    from flwr_distill.task.errors import SettingsError

    with exit_on(SettingsError, command="policy check"):
        policy = read_policy(file)
        for sentence in [*in_words(policy), *cannot_hold(policy)]:
            typer.echo(sentence)


@policy.command()
def allow(
    run: Annotated[int, typer.Argument(help="Id of the run.", min=1)],
    state_dir: Annotated[
        Path, typer.Option(help="The node's state directory.", exists=True, file_okay=False)
    ] = Path("state/node"),
) -> None:
    """Let a run have this node's samples as they are, under a policy with `raw-data: ask`.

    The node takes part from the next time that the run asks it. A run that resumes it has another
    id, and needs a permission of its own.
    """
    from flwr_distill.node.permissions import allow_raw_data

    with exit_on(OSError, command="policy allow"):
        allow_raw_data(state_dir, run)
    typer.echo(f"Run {run} may have this node's samples as they are.")
