"""`flwr-distill distill`: condense a labelled set of images on this machine."""

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
        str, typer.Option(help="Its weights: a safetensors file.", show_default="as it draws them")
    ] = "",
    steps: Steps = None,
    start: Start = "class-stats",
    allow_real_start: Annotated[
        bool,
        typer.Option(
            "--allow-real-start",
            help="Permit real: its copies stay nearly unchanged.",
        ),
    ] = False,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    data_root: DataRoot = None,
    shape: ImageShape = None,
    judge: Annotated[
        Literal["quick", "full"],
        typer.Option(
            help="Networks that are trained for the table: one, or the papers' and others too."
        ),
    ] = "quick",
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/distilled"),
) -> None:
    """Distil a set of images into a few virtual ones, and measure how good they are.

    SOURCE is a named data set (digits, mnist, cifar10 ...); images by class, such as a folder with
    one folder of images per class (./digits, to tell it from the name), a folder with a list, a
    WebDataset or Parquet files; or an .npz with the arrays images (uint8) and labels.

    Writes virtual.safetensors, a picture of the images (virtual.png) and summary.json to OUTPUT.

    Methods: dm (distribution matching) for images from 16 pixels a side on, and for smaller ones of
    few of the task's classes; kip (kernel inducing points) for smaller ones of most classes, where
    it is better and faster; kip-negatives for smaller ones of a single class, which kip cannot
    learn. auto chooses so.

    With --formation 2, a virtual image holds 2 x 2 smaller ones: four times as many to train on in
    the same bytes.

    A table compares networks trained on the virtual images, on as many random real ones, and on
    all: with the same network, start and number of steps. The quick judge is the data set's default
    network (500 steps of Adam, batches of at most 64). The full ones are, besides, the papers'
    ConvNet (1,000 steps of SGD), LeNet, an MLP and a ResNet-8 (3,000 of Adam), those that take the
    images' shape; their training images are changed at random (train.augment="auto"). The test
    images are the data set's test part, or a held-back fifth of each class of a folder or npz.

    The privacy card shows how near virtual images are to the images they were made from, and to
    held-back ones.
    """
    # Here, because every subcommand imports this file, and the node command must not import torch.
    from flwr_distill.cli.distillation import REFUSALS, Options, condense

    options = Options(
        source=source,
        method=method,
        per_class=per_class,
        formation=formation,
        bits=bits,
        network=network,
        weights=weights,
        steps=steps,
        start=start,
        allow_real_start=allow_real_start,
        seed=seed,
        device=device,
        data_root=data_root,
        shape=shape,
        judge=judge,
        output=output,
    )
    with exit_on(*REFUSALS, command="distill"):
        condense(options, Console())
