"""`flwr-distill audit`: attack virtual data of one's own images, before they are sent."""

from typing import Annotated

import typer
from rich.console import Console

from flwr_distill.cli.errors import exit_on
from flwr_distill.cli.options import (
    DataRoot,
    FormationSide,
    ImageShape,
    Method,
    PerClass,
    Seed,
    Start,
    Steps,
)


def audit(
    source: str,
    method: Method = "auto",
    per_class: PerClass = 10,
    start: Start = "class-stats",
    formation: FormationSide = 0,
    steps: Steps = None,
    sets: Annotated[
        int, typer.Option(min=8, help="Random halves of the images that are distilled.")
    ] = 65,
    most: Annotated[
        int, typer.Option(min=20, help="Images of each class that are used, at most.")
    ] = 100,
    canaries: Annotated[
        int, typer.Option(min=0, help="Wrongly labelled, strange and copied images, of each.")
    ] = 5,
    seed: Seed = 0,
    data_root: DataRoot = None,
    shape: ImageShape = None,
) -> None:
    """Measure what virtual data made of your images would tell of single ones.

    SOURCE is as for flwr-distill distill. Random halves of the images are distilled; an attacker
    who knows all the images, the method and the seed then guesses which half each came from, with
    the other halves as examples (LiRA). That is more than anyone who gets your virtual data knows,
    so that a real attacker finds fewer. Nothing leaves this machine.

    More sets make the attack stronger and the numbers surer. An attack that finds nothing is no
    proof: differential privacy is one (hfldd.dp-epsilon).
    """
    # Here, because every subcommand imports this file, and the node command must not import torch.
    from flwr_distill.cli.auditing import Options, report
    from flwr_distill.cli.distillation import REFUSALS

    options = Options(
        source=source,
        method=method,
        per_class=per_class,
        start=start,
        formation=formation,
        steps=steps,
        sets=sets,
        most=most,
        canaries=canaries,
        seed=seed,
        data_root=data_root,
        shape=shape,
    )
    with exit_on(*REFUSALS, command="audit"):
        report(options, Console())
