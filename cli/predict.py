"""`flwr-distill predict`: classes of images, or of a table's rows, by an exported model."""

from itertools import chain
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
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Image files, or .csv and .parquet tables.", show_default=False
        ),
    ],
) -> None:
    """Say of which class each image or row is, with its probability and the next best classes.

    MODEL is a file that `flwr-distill runs export` wrote. Images are converted to its channels and
    size, as nodes do with their own. Columns of a table are found by name, and standardised. A .pt
    file is a program: use only those that you trust.
    """
    # Here, because every subcommand imports this file, and the node command must not import torch.
    from server.export.prediction import ModelFileError, read_model
    from server.page.words import percent
    from task.datasets import DatasetError

    for file in files:
        if not file.is_file():
            fail(f"{file}: there is no such file", "predict")
    table = Table("sample", "class", "probability", "next")
    with exit_on(ModelFileError, DatasetError, command="predict"):
        exported = read_model(model)
        classes = exported.description.classes
        table.caption = f"label map {exported.description.spec.labels.digest}"
        for sample, probabilities in chain.from_iterable(map(exported.predictions, files)):
            top = probabilities.topk(min(1 + NEXT_BEST, len(classes)))
            best, *others = (
                (classes[index], percent(probability))
                for index, probability in zip(
                    top.indices.tolist(), top.values.tolist(), strict=True
                )
            )
            following = ", ".join(f"{name} {share}" for name, share in others)
            table.add_row(*map(Text, (sample, *best, following)))
    Console().print(table)
