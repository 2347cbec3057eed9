"""`flwr-distill predict`: classes of images, or of a table's rows, by an exported model."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flwr_distill.cli.errors import exit_on, fail

if TYPE_CHECKING:
    from torch import Tensor

    from flwr_distill.server.export.prediction import ExportedModel

NEXT_BEST = 2
"""Classes to name besides the most probable one."""


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
    """Print the class of each image or row, with its probability and the next best classes.

    MODEL is a file from `flwr-distill runs export`. Images are converted to its channels and size,
    as on nodes. Columns of a table are found by name, and standardised. A .pt file is a program:
    use only files that you trust.

    Unreadable files are listed at the end, and the command exits with 1.
    """
    # Here, because every subcommand imports this file, and the node command must not import torch.
    from flwr_distill.server.export.prediction import ModelFileError, read_model
    from flwr_distill.server.page.words import percent
    from flwr_distill.task.datasets import DatasetError

    table = Table("sample", "class", "probability", "next")
    problems: list[str] = []
    with exit_on(ModelFileError, DatasetError, command="predict"):
        exported = read_model(model)
        classes = exported.description.classes
        table.caption = f"label map {exported.description.spec.labels.digest}"
        for sample, probabilities in _predictions(exported, files, problems):
            top = probabilities.topk(min(1 + NEXT_BEST, len(classes)))
            best, *others = (
                (classes[index], percent(probability))
                for index, probability in zip(
                    top.indices.tolist(), top.values.tolist(), strict=True
                )
            )
            following = ", ".join(f"{name} {share}" for name, share in others)
            table.add_row(*map(Text, (sample, *best, following)))
    if table.row_count:
        Console().print(table)
    if problems:
        fail("\n".join(problems), "predict")


def _predictions(
    model: "ExportedModel", files: Sequence[Path], problems: list[str]
) -> Iterator[tuple[str, "Tensor"]]:
    """Names of samples with their probabilities; adds unreadable files to `problems`."""
    from flwr_distill.task.image_files import UnusableFileError

    for file in files:
        if not file.is_file():
            folder = f"is a folder (name its files, as in {file}/*)"
            problems.append(f"{file}: {folder if file.is_dir() else 'no such file'}")
            continue
        try:
            yield from model.predictions(file)
        except UnusableFileError as error:
            problems.append(str(error))
