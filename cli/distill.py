"""`flwr-distill distill` and `audit`: condense images on this machine, and attack the result."""

from pathlib import Path
from typing import Annotated, Literal

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


def distill(
    source: str,
    method: Method = "auto",
    per_class: PerClass = 10,
    formation: FormationSide = 0,
    bits: Annotated[int, typer.Option(min=1, max=8, help="Bits of a pixel.")] = 4,
    network: Annotated[
        str,
        typer.Option(
            help="Own network for the features of dm: package.module:Class.",
            show_default="random networks",
        ),
    ] = "",
    weights: Annotated[
        str, typer.Option(help="Its weights: a safetensors file.", show_default="random")
    ] = "",
    steps: Steps = None,
    start: Start = "class-stats",
    allow_real_start: Annotated[
        bool,
        typer.Option("--allow-real-start", help="Permit real: copies stay nearly unchanged."),
    ] = False,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    data_root: DataRoot = None,
    shape: ImageShape = None,
    judge: Annotated[
        Literal["quick", "full"],
        typer.Option(help="Networks to train for the table: one, or also the papers' and others."),
    ] = "quick",
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/distilled"),
) -> None:
    """Distil a set of images into a few virtual ones, and measure how good they are.

    SOURCE is a named data set (digits, mnist, cifar10 ...), images by class, or an .npz with the
    arrays images (uint8) and labels. Images by class are a folder with one folder per class
    (./digits is a folder, digits a name), a folder with a list, a WebDataset or Parquet files.

    Writes virtual.safetensors, a picture of the images (virtual.png) and summary.json to OUTPUT.

    Methods: dm (distribution matching) is for images from 16 pixels a side, and for smaller ones of
    few classes. kip (kernel inducing points) is better and faster for smaller ones of most classes.
    kip-negatives is for smaller ones of a single class, which kip cannot learn. auto chooses.

    With --formation 2, a virtual image contains 2 x 2 smaller ones: four times as many training
    images in the same bytes.

    A table compares networks trained on the virtual images, on as many random real ones, and on
    all, with the same start and steps. The quick judge is the data set's default network (500 steps
    of Adam, batches of at most 64). The full panel adds the papers' ConvNet (1,000 steps of SGD),
    LeNet, an MLP and a ResNet-8 (3,000 of Adam), as far as the images' shape fits. Their training
    images are changed at random (train.augment="auto"). The test images are the data set's test
    part, or a held-back fifth of each class of a folder or npz.

    The privacy card shows the distance of virtual images to their source images and to held-back
    ones.
    """
    options = {**locals()}

    from flwr_distill.cli.distillation import (  # here: imports torch
        REFUSALS,
        DistillOptions,
        condense,
    )

    with exit_on(*REFUSALS, command="distill"):
        condense(DistillOptions(**options), Console())


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

    from flwr_distill.cli.distillation import REFUSALS, AuditOptions, report_attacks

    with exit_on(*REFUSALS, command="audit"):
        report_attacks(AuditOptions(**options), Console())
