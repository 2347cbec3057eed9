"""`flwr-distill distill`: condense a labelled set of images on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def distill(
    source: str,
    method: Annotated[
        str, typer.Option(help="Distiller: auto, dm, gm, kip ... or package.module:function.")
    ] = "auto",
    per_class: Annotated[int, typer.Option(min=1, help="Virtual images of each class.")] = 10,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps.", show_default="the method's own")
    ] = None,
    start: Annotated[
        str, typer.Option(help="What they start from: class-stats, pixel-stats, noise or real.")
    ] = "class-stats",
    allow_real_start: Annotated[
        bool,
        typer.Option("--allow-real-start", help="Permit real: copies that stay nearly unchanged."),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random draw.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    data_root: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the data sets.", show_default="$FLWR_DISTILL_DATA_ROOT, else data"
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Channels x height x width for the images of a folder, as in 3x32x32.",
            show_default="their own",
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/distilled"),
) -> None:
    """Distil a set of images into a few virtual ones, and tell what they are worth.

    SOURCE is digits, mnist, cifar10 or another data set by name; a folder with one folder of images
    for each class (./digits, to tell it from the name); or an .npz with the arrays images (uint8)
    and labels.

    Writes virtual.safetensors, a picture of the images (virtual.png) and summary.json to OUTPUT.

    A table compares networks trained on the virtual images, on as many random real ones, and on
    all: the same network, start and number of steps for each (500 of Adam, at most 64 images
    each), tested on images that took no part: the data set's test part, or a fifth of each class
    that is held back from a folder or npz.

    The privacy card tells how near virtual images come to those they were made from, beside the
    same for held-back ones.
    """
    # Here, because every subcommand imports this file, and a node's is to do without torch.
    from cli.distillation import REFUSALS, Asked, condense

    asked = Asked(
        source=source,
        method=method,
        per_class=per_class,
        steps=steps,
        start=start,
        allow_real_start=allow_real_start,
        seed=seed,
        device=device,
        data_root=data_root,
        shape=shape,
        output=output,
    )
    try:
        condense(asked, Console())
    except REFUSALS as error:
        typer.echo(f"flwr-distill distill: {error}", err=True)
        raise typer.Exit(1) from error
