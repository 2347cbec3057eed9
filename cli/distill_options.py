"""Options of `flwr-distill distill` and `audit`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from flwr_distill.cli.options import DataRoot, Seed


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
