"""`flwr-distill predict`: classes of images, by an exported model."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.errors import exit_on, fail

NEXT_BEST = 2
"""Classes that are named besides the most probable one."""


def predict(
    model: Annotated[
        Path, typer.Argument(help="Model file: .onnx, .safetensors, .pt.", show_default=False)
    ],
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE...", help="Image files.", show_default=False)
    ],
) -> None:
    """Say of which class each image is, with its probability and the next best classes.

    MODEL is a file that `flwr-distill runs export` wrote. Images are converted to its channels and
    size, as nodes do with their own. A .pt file is a program: use only those that you trust.

    Files that cannot be read are named after the others' classes, and the command exits with 1.
    """
    # Here, because every subcommand imports this file, and the node command must not import torch.
    from server.export.prediction import ModelFileError, read_model
    from server.page.words import percent
    from task.datasets import DatasetError
    from task.image_files import UnusableFileError

    table, problems = Table("image", "class", "probability", "next"), []
    with exit_on(ModelFileError, DatasetError, command="predict"):
        exported = read_model(model)
        classes = exported.description.classes
        table.caption = f"label map {exported.description.spec.labels.digest}"
        for image in images:
            if not image.is_file():
                problems.append(f"{image}: there is no such file")
                continue
            try:
                probabilities = exported.probabilities(image)
            except UnusableFileError as error:
                problems.append(str(error))
                continue
            top = probabilities.topk(min(1 + NEXT_BEST, len(classes)))
            best, *others = (
                (classes[index], percent(probability))
                for index, probability in zip(
                    top.indices.tolist(), top.values.tolist(), strict=True
                )
            )
            following = ", ".join(f"{name} {share}" for name, share in others)
            table.add_row(*map(Text, (str(image), *best, following)))
    if table.row_count:
        Console().print(table)
    if problems:
        fail("\n".join(problems), "predict")
