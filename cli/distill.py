"""`flwr-distill distill` and `audit`: condense images on this machine, and attack the result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from flwr_distill.cli.errors import exit_on
from flwr_distill.cli.options import DataRoot, Seed, with_options


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """Options of `flwr-distill distill` and `audit`."""

    source: str
    method: Annotated[
        str, typer.Option(help="auto, dm, kip, kip-negatives or package.module:function.")
    ] = "auto"
    per_class: Annotated[int, typer.Option(min=1, help="Virtual images of each class.")] = 10
    formation: Annotated[
        int,
        typer.Option(
            min=0,
            max=4,
            help="Smaller images along each side of a virtual image; 0: the method chooses.",
        ),
    ] = 0
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps.", show_default="the method's own")
    ] = None
    start: Annotated[
        str, typer.Option(help="Start images: class-stats, pixel-stats, noise or real.")
    ] = "class-stats"
    seed: Seed = 0
    data_root: DataRoot = None
    shape: Annotated[
        str | None,
        typer.Option(
            help="Channels x height x width for the images of a folder, as in 3x32x32.",
            show_default="their own",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DistillOptions(SharedOptions):
    """Options of `flwr-distill distill`."""

    bits: Annotated[int, typer.Option(min=1, max=8, help="Bits of a pixel.")] = 4
    network: Annotated[
        str,
        typer.Option(
            help="Own network for the features of dm: package.module:Class.",
            show_default="random networks",
        ),
    ] = ""
    weights: Annotated[
        str, typer.Option(help="Its weights: a safetensors file.", show_default="random")
    ] = ""
    allow_real_start: Annotated[
        bool,
        typer.Option("--allow-real-start", help="Permit real: copies stay nearly unchanged."),
    ] = False
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    judge: Annotated[
        Literal["quick", "full"],
        typer.Option(help="Networks to train for the table: one, or also the papers' and others."),
    ] = "quick"
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/distilled")


@dataclass(frozen=True, kw_only=True)
class AuditOptions(SharedOptions):
    """Options of `flwr-distill audit`."""

    sets: Annotated[int, typer.Option(min=8, help="Random halves of the images to distil.")] = 65
    most: Annotated[int, typer.Option(min=20, help="Images of each class to use, at most.")] = 100
    canaries: Annotated[
        int, typer.Option(min=0, help="Wrongly labelled, strange and copied images, of each.")
    ] = 5


@with_options("options", DistillOptions)
def distill(options: DistillOptions) -> None:
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
    from flwr_distill.cli.distillation import REFUSALS, condense  # here: imports torch

    with exit_on(*REFUSALS, command="distill"):
        condense(options, Console())


@with_options("options", AuditOptions)
def audit(options: AuditOptions) -> None:
    """Measure what virtual data of your images would reveal about single images.

    SOURCE is as for flwr-distill distill. Random halves of the images are distilled. An attacker
    then guesses the half of each image, with the other halves as examples (LiRA). The attacker
    knows all the images, the method and the seed. A real receiver of your virtual data knows less,
    and finds fewer. Nothing leaves this machine.

    More sets make the attack stronger and the numbers more certain. An attack that finds nothing
    proves nothing; differential privacy is a proof (hfldd.dp-epsilon).
    """
    from flwr_distill.cli.distillation import REFUSALS, report_attacks

    with exit_on(*REFUSALS, command="audit"):
        report_attacks(options, Console())
