"""`flwr-distill audit`: attack virtual data of your own images before you send them."""

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
    sets: Annotated[int, typer.Option(min=8, help="Random halves of the images to distil.")] = 65,
    most: Annotated[int, typer.Option(min=20, help="Images of each class to use, at most.")] = 100,
    canaries: Annotated[
        int, typer.Option(min=0, help="Wrongly labelled, strange and copied images, of each.")
    ] = 5,
    seed: Seed = 0,
    data_root: DataRoot = None,
    shape: ImageShape = None,
) -> None:
    """Measure what virtual data of your images would reveal about single images.

    SOURCE is as for flwr-distill distill. Random halves of the images are distilled. An attacker
    then guesses the half of each image, with the other halves as examples (LiRA). The attacker
    knows all the images, the method and the seed. A real receiver of your virtual data knows less,
    and finds fewer. Nothing leaves this machine.

    More sets make the attack stronger and the numbers more certain. An attack that finds nothing
    proves nothing; differential privacy is a proof (hfldd.dp-epsilon).
    """
    options = {**locals()}

    from flwr_distill.cli.auditing import Options, report  # here: imports torch
    from flwr_distill.cli.distillation import REFUSALS

    with exit_on(*REFUSALS, command="audit"):
        report(Options(**options), Console())
