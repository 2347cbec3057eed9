"""`flwr-distill audit` at its command line, on small images of its own."""

import numpy as np
from typer.testing import CliRunner

from flwr_distill.cli.main import app


def invoke(tmp_path, *arguments):
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(60) % 2)
    arguments = [
        "audit",
        str(tmp_path / "own.npz"),
        "--sets",
        "8",
        "--steps",
        "2",
        "--per-class",
        "2",
    ]
    result = CliRunner().invoke(app, [*arguments, *arguments])
    return str(result.exit_code) + " ".join(result.output.split())


def test_it_says_what_an_attacker_finds_in_plain_words(tmp_path):
    reason = invoke(tmp_path, "--canaries", "2", "--most", "20", "--method", "dm")
    assert reason.startswith("0")
    for words in (
        "40 images in halves, 8 of these distilled by dm from class-stats",
        "while it accuses 1 of 100 others falsely; a guess finds 1.",
        "Images that are mislabelled:",
        "are nearer to a source image than to any other of yours",
    ):
        assert words in reason


def test_what_cannot_be_audited_is_refused_with_the_remedy(tmp_path):
    assert "take fewer canaries or more images" in invoke(tmp_path, "--canaries", "30")
    assert "distiller 'nothing' is unknown" in invoke(tmp_path, "--method", "nothing")
