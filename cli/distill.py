"""`flwr-distill distill`: condense a labelled set of images on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.errors import exit_on
from cli.options import DataRoot


def distill(
    source: str,
    method: Annotated[
        str, typer.Option(help="Distiller: auto, dm, gm, kip ... or package.module:function.")
    ] = "auto",
    per_class: Annotated[int, typer.Option(min=1, help="Virtual images of each class.")] = 10,
    formation: Annotated[
        int,
        typer.Option(
            min=0,
            max=4,
            help="Smaller images along each side of a virtual image; 0: the method chooses.",
        ),
    ] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps.", show_default="the method's own")
    ] = None,
    start: Annotated[
        str, typer.Option(help="Start images: class-stats, pixel-stats, noise or real.")
    ] = "class-stats",
    allow_real_start: Annotated[
        bool,
        typer.Option(
            "--allow-real-start",
            help="Permit real: its copies stay nearly unchanged.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random draw.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    data_root: DataRoot = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Channels x height x width for the images of a folder, as in 3x32x32.",
            show_default="their own",
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/distilled"),
) -> None:
    """Distil a set of images into a few virtual ones, and measure how good they are.

    SOURCE is a named data set (digits, mnist, cifar10 ...); a folder with one folder of images per
    class (./digits, to tell it from the name); or an .npz with the arrays images (uint8) and
    labels.

    Writes virtual.safetensors, a picture of the images (virtual.png) and summary.json to OUTPUT.

    With --formation 2, a virtual image holds 2 x 2 smaller ones: four times as many to train on in
    the same bytes.

    A table compares networks trained on the virtual images, on as many random real ones, and on
    all: with the same network, start and number of steps (500 of Adam, batches of at most 64). The
    test images are the data set's test part, or a held-back fifth of each class of a folder or npz.

    The privacy card shows how near virtual images are to the images they were made from, and to
    held-back ones.
    """
    # Here, because every subcommand imports this file, and the node command must not import torch.
    from cli.distillation import REFUSALS, Options, condense

    options = Options(
        source=source,
        method=method,
        per_class=per_class,
        formation=formation,
        steps=steps,
        start=start,
        allow_real_start=allow_real_start,
        seed=seed,
        device=device,
        data_root=data_root,
        shape=shape,
        output=output,
    )
    with exit_on(*REFUSALS, command="distill"):
        condense(options, Console())
