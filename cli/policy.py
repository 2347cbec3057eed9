"""`flwr-distill policy`: what a node's policy says, in words."""

from typing import Annotated

import typer

from cli.errors import exit_on

policy = typer.Typer(help="Look at a node's policy before it is used.")


@policy.callback()
def _group() -> None:
    """Make `check` a subcommand although it is the only one."""


@policy.command()
def check(
    file: Annotated[str, typer.Argument(help="A policy's YAML file, or open or hospital.")],
) -> None:
    """Check a policy, and say in words what a node with it does and refuses.

    Exits with 1 if the policy is wrong, with the key or value that is.
    """
    from node.policy import cannot_hold, in_words, read_policy  # here: imports pydantic
    from task.settings import SettingsError

    with exit_on(SettingsError, command="policy check"):
        policy = read_policy(file)
        for sentence in [*in_words(policy), *cannot_hold(policy)]:
            typer.echo(sentence)
