"""`flwr-distill audit` at its command line, on small images of its own."""

import numpy as np

from .commands import assert_refused, command


def audit(tmp_path, *options):
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(60) % 2)
    small = ("--sets", 8, "--steps", 2, "--per-class", 2)
    return command("audit", tmp_path / "own.npz", *small, *options)


def test_it_reports_what_an_attacker_finds_in_plain_words(tmp_path):
    result = audit(tmp_path, "--canaries", 2, "--most", 20, "--method", "dm")
    assert result.exit_code == 0
    output = " ".join(result.output.split())
    for words in (
        "40 images in halves, 8 of these distilled by dm from class-stats",
        "while it accuses 1 of 100 others falsely; a guess finds 1.",
        "Images that are mislabelled:",
        "are nearer to a source image than to any other of yours",
    ):
        assert words in output


def test_what_cannot_be_audited_is_refused_with_the_remedy(tmp_path):
    assert_refused(audit(tmp_path, "--canaries", 30), "fewer canaries")
    assert_refused(audit(tmp_path, "--method", "nothing"), "nothing")
