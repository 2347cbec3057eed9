"""The list of what a run may ask of a node, and of each number that may leave it, with its bound.

With ``settings: listed`` a node refuses all else. Methods declare messages and their keys
(`protocol.method.Phase`). Of an installed package any declared setting is in its range, and metrics
count as exact, but for those in `Phase.covered`.
"""

from __future__ import annotations

from collections.abc import Mapping

SERVER = "server"
RANGE = "range"
LINKS = "links"
OWNER = "owner"
OFF = "off"
PATHS = "paths"
CODE = "code"
BOUNDS: Mapping[str, str] = {
    SERVER: "only the server reads it",
    RANGE: "any value in its range: it decides how a node computes, not what may leave",
    LINKS: "keys, tokens and places of other nodes, checked as docs/what-leaves.md says",
    OWNER: "the node's owner decides; the run's value does not count",
    OFF: "refused unless it is false",
    PATHS: "a name: of a public set, or `@NAME` of the owner's `files`; no path",
    CODE: "a name; no code to import as `module:attribute`",
}
"""What bounds a setting; other bounds are keys of the policy."""


def _rows(bound: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), bound)


SETTINGS: Mapping[str, str] = {
    **_rows(
        SERVER,
        """num-rounds min-nodes fraction-train phase-timeout quorum buffer max-staleness down-codec
        up-codec patience-failed server-device runs-dir resume keep-checkpoints hooks queue-id edge
        defence most-samples aggregator aggregator-args norm-threshold secure-sums-norm
        fraction-evaluate best-metric evaluate.model statistics

        aggregation most-say main-cluster cluster-size similarity rescaling eps eps-growth max-eps
        closure transitive num-malicious-nodes num-nodes-to-select
        noise-multiplier initial-clipping-norm target-clipped-quantile clip-norm-lr
        clipped-count-stddev clipping-norm eta tau beta beta-1
        beta-2 server-learning-rate server-momentum q server-lr server-epochs server-batch-size
        sectors fixed-leader least-classes audit reference reference-size
        global-per-class global-steps every selections match groups votes refresh-every
        refresh-steps rotate complete-clusters average-rounds heads budget""",
    ),
    **_rows(
        RANGE,
        """seed trains fourier size mean std interpolation rank scheme classes alpha min-of-a-class
        clusters samples spread pooled reserved max-of-a-class test-share max-samples shape together

        optimizer lr lr-schedule class-weights momentum weight-decay batch-size drop-last
        proximal-mu kd-lambda kd-kernel feature-layer precision augment dp-clip on server-round
        clipping_norm codec

        num-classes package frozen regularisation

        starts-from means-of image-optimizer regulariser

        projection clip head personal width distill-steps per-class radius gamma
        temperature distill-lr distill-weight-decay distill-batch-size patience average least-gain
        rule longest leads formation first-steps contrast gradient auxiliary-size mu
        initial-steps initial-lr initial-batch-size distilled-size kip-lr kip-batch-size kip-lambda
        kip-relative bits own-divergence balanced
        average-last virtual-share restore-best left-out ranks images of-a-class steps method
        settings run-id node-id round resumes columns column-means column-deviations label
        refine-steps""",
    ),
    **_rows(
        LINKS,
        """sender receiver purpose token largest peer-key peer-name peer-certificate peer-signature
        address-signature permit payload digest number nodes names seal-keys mask-keys commitments
        certificates signatures members sealed most survivors""",
    ),
    **_rows(OWNER, "holdout data-root"),
    **_rows(OFF, "download allow-real-start"),
    **_rows(PATHS, "weights index-file auxiliary network-weights"),
    **_rows(CODE, "dataset model distiller network"),
    **_rows("strategies", "strategy start strategy-args"),
    **_rows("starts", "hfldd.start"),
    **_rows("raw-data", "share-raw-data"),
    **_rows("least-noise", "dp-noise dp-epsilon"),
    **_rows("most-delta", "dp-delta"),
    **_rows("most-epochs", "local-epochs distill-epochs"),
    **_rows("single-updates", "secure-sums"),
    **_rows("counts", "evaluate.counts"),
    **_rows("direct-links", "links link address"),
}
"""What bounds each setting of a run and each key of a message, by its name or its dotted name."""

EXACT = "exact"
COUNTED = "counted"
EVALUATED = "evaluation-epsilon"
COUNTS = "counts"
METRIC_BOUNDS: Mapping[str, str] = {
    COUNTED: "counts, what privacy has cost, and what follows from a model that leaves anyway",
    EXACT: "exact numbers of samples: with `least-noise` above 0 they do not leave, but for what "
    "follows from virtual data under differential privacy",
    EVALUATED: "with `evaluation-epsilon`: accuracy is rounded, has noise, and is booked; others "
    "do not leave",
    COUNTS: "counts of held-out samples: with `counts: allowed` alone; with `counts-epsilon` only "
    "`confusion`, with noise, and booked; `withheld` is a word on why there are none",
}

METRICS: Mapping[str, str] = {
    **_rows(
        COUNTED,
        """num-examples num-steps partition-id sector together files dp-epsilon dp-epsilon-of-all
        dp-delta virtual-epsilon num-values kept-parcels rejected num-parcels votes norm_bit
        update-norm needs-global-data""",
    ),
    **_rows(
        EXACT,
        """train-loss train-accuracy own-divergence highest-cosine median-cosine least-distance
        median-distance nearer-to-own by-chance audited-ordinary audited-worst distill-loss
        distill-epochs""",
    ),
    **_rows(EVALUATED, "eval-accuracy eval-loss shared-accuracy"),
    **_rows(COUNTS, "confusion own others calibration withheld"),
}
"""What bounds each metric of a reply, and each key of the record ``counts``, by its name."""


def bound_of(where: str, name: str) -> str | None:
    """What bounds a setting of a table ('' for keys of messages); None if it is not on the list."""
    dotted = f"{where}.{name}" if where else name
    stem = name.rpartition(".")[0] if name.rpartition(".")[2].isdecimal() else name
    return SETTINGS.get(dotted) or SETTINGS.get(stem)
