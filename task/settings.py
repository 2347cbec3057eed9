"""Run-config keys that server and nodes read, as one frozen and validated object.

A Flower run config is a flat mapping of dotted keys (``train.lr``). :class:`TaskSettings` reads the
keys that nodes need and ignores others; the server's settings extend it and reject unknown keys.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from flwr_distill.task.backbone_settings import BackboneSettings
from flwr_distill.task.block import Block as Block
from flwr_distill.task.columns import Columns
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.labels import MAX_NAMES, names_problem
from flwr_distill.task.text_files import composed

RunConfigValue = bool | int | float | str
Precision = Literal["float32", "tf32", "bf16"]
Kernel = Literal["gaussian", "centred"]
Change = Literal["shift", "scale", "rotate", "shear", "flip", "colour", "cutout"]
Start = Literal["class-stats", "pixel-stats", "noise", "real"]
MeansOf = Literal["groups", "classes"]
ImageOptimizer = Literal["adam", "sgd"]
CHANGES: tuple[Change, ...] = get_args(Change)
"""Of training images; what each does: `task.augmentation.augmented`."""

NO_WEIGHTS, BALANCED = "none", "balanced"
MAX_CLASS_WEIGHT = 1000


class PartitionSettings(Block):
    """How a named dataset is split: into training and test, and over nodes (``partition.*``)."""

    scheme: Literal[
        "pathological",
        "dirichlet",
        "shards",
        "iid",
        "label-quantity",
        "pareto",
        "cluster-mc",
        "cluster-bc",
        "cluster-uc",
        "class-pairs",
        "pareto-draws",
        "index-file",
    ] = "pathological"
    """``pathological`` (C classes per node, in blocks), ``dirichlet``, ``shards``, ``iid``,
    ``label-quantity`` (C classes per node, which overlap partly), ``pareto``, ``cluster-mc``,
    ``cluster-bc``, ``cluster-uc``, ``class-pairs`` and ``pareto-draws`` (like the splits published
    with CADIS's code) or ``index-file``; see :func:`task.partition.partition_indices`."""
    classes: Annotated[int, Field(ge=0)] = 0
    """Classes per node, C, of ``pathological``, ``label-quantity``, ``pareto`` and
    ``pareto-draws``, which may draw one twice; shards per node of ``shards``. 0 takes the smallest
    number, but at least 2, with which nodes together hold all classes."""
    alpha: Annotated[float, Field(gt=0)] = 0.5
    """Concentration of ``dirichlet``, exponent of ``pareto`` and ``pareto-draws``; smaller is more
    skewed."""
    min_of_a_class: Annotated[int, Field(ge=0)] = 0
    """Fewest samples of each class that ``dirichlet`` gives each node; the shares of a class are
    redrawn until all nodes have as many. 0 is no bound."""
    clusters: str = ""
    """Ratio of nodes per cluster, ``12:5:3``; empty uses the scheme's own. Percentages of the nodes
    for ``class-pairs``, ``30:30:20:10:10``: each cluster has two classes, and nodes in none have
    random pairs of the others."""
    samples: str = ""
    """Mean samples of a node of ``class-pairs``, for all, or for each cluster as in ``104:5000``;
    the last is that of all others. Empty is as many as all classes allow, as are means that are
    too large for them."""
    spread: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Standard deviation of the samples of nodes of ``class-pairs``, as a share of their mean."""
    pooled: Annotated[int, Field(ge=0)] = 0
    """Nodes whose parts a single node has together, to compare with central training
    (``min-nodes = 1``); 0 is off."""
    index_file: Annotated[str, Field(validate_default=True)] = ""
    """JSON file of ``index-file``: client id -> list of sample indices."""
    max_of_a_class: Annotated[int, Field(ge=0)] = 0
    """Training samples of each class that are split at most, drawn by the seed; 0 splits all."""
    reserved: Annotated[int, Field(ge=0)] = 0
    """Training samples among these that no node gets, drawn by the seed: the auxiliary set
    ``reserved``."""
    test_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each class that is for testing, drawn from training and test samples alike; 0 keeps
    the data set's own split."""
    max_samples: Annotated[int, Field(ge=0)] = 0
    """Samples that ``test-share`` splits, at most: the first of the data set, those for training
    before those for testing. The others are not used; 0 takes all."""

    @field_validator("max_samples")
    @classmethod
    def _is_split(cls, max_samples: int, info: ValidationInfo) -> int:
        if max_samples and not info.data.get("test_share", 1):
            raise ValueError("needs partition.test-share above 0, as in 0.2")
        return max_samples

    @field_validator("clusters", "samples")
    @classmethod
    def _are_sizes(cls, clusters: str) -> str:
        if clusters and not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)*", clusters):
            raise ValueError("must be sizes >= 1 with colons between, as in 12:5:3")
        return clusters

    @field_validator("index_file")
    @classmethod
    def _is_named(cls, file: str, info: ValidationInfo) -> str:
        if info.data.get("scheme") == "index-file" and not file:
            raise ValueError(
                'must name a file for partition.scheme = "index-file": JSON, client id -> list of '
                "sample indices, at the same path on every node"
            )
        return file

    @field_validator("max_of_a_class", "reserved")
    @classmethod
    def _are_no_index_files(cls, number: int, info: ValidationInfo) -> int:
        if number and info.data.get("scheme") == "index-file":
            raise ValueError(
                'must be 0 for partition.scheme = "index-file", whose file has all nodes\' samples'
            )
        return number


class PrivateSettings(Block):
    """Format of the nodes' own data with ``dataset="private"`` (``private.*``)."""

    shape: str = "3x32x32"
    """Channels (1 or 3) x height x width that all images are converted to."""
    num_classes: Annotated[int, Field(ge=2, le=MAX_NAMES)] = 10
    """Number of classes over all nodes; not used if ``classes`` is set."""
    classes: str = ""
    """Names of the classes over all nodes, in the order of the model's outputs: ``cat,dog,fish`` or
    ``1,2,3,4``. Nodes name their class folders so. Not needed if folders are named by numbers from
    0, or alike on all nodes."""
    label: Annotated[str, Field(min_length=1)] = "label"
    """Column of a table that has the classes, which ``classes`` must name."""
    columns: str = ""
    """Columns that a run reads of nodes' tables, by name, in the order of the model's inputs:
    ``age,sex:f|m,chol:199+-110``. After a colon stand the categories, or the mean and deviation to
    standardise by. Other numbers are standardised by means and deviations over all nodes. Empty for
    images."""

    @field_validator("shape")
    @classmethod
    def _is_a_shape(cls, shape: str) -> str:
        if not re.fullmatch(r"[13]x[1-9]\d*x[1-9]\d*", shape):
            raise ValueError("must be channels (1 or 3) x height x width, as in 3x32x32")
        return shape

    @field_validator("classes")
    @classmethod
    def _are_distinct_names(cls, classes: str) -> str:
        names = _listed(classes)
        problem = "there is one" if len(names) == 1 else names_problem(names)
        if problem:
            raise ValueError(f'must be two or more names, as in "cat,dog,fish" ({problem})')
        return classes

    @field_validator("columns")
    @classmethod
    def _are_columns_of_a_table(cls, text: str, info: ValidationInfo) -> str:
        if not text or not {"classes", "label"} <= info.data.keys():
            return text
        columns = Columns.parsed(text, info.data["label"])
        if not info.data["classes"]:
            raise ValueError('needs the classes of its label, private.classes="no,yes"')
        if problem := names_problem(columns.names):
            raise ValueError(f"with private.label = {columns.label!r}, {problem}")
        return text

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes by label; empty if not set."""
        return _listed(self.classes)

    @property
    def table(self) -> Columns | None:
        """Columns of nodes' tables; None for images."""
        return Columns.parsed(self.columns, self.label) if self.columns else None


def _listed(names: str) -> tuple[str, ...]:
    return tuple(composed(name.strip()) for name in names.split(",")) if names else ()


class TrainSettings(Block):
    """Local training on a node (``train.*``)."""

    on: Literal["real", "virtual"] = "real"
    """What nodes train on: their samples, or with ``virtual`` the images that each distils of them
    once, by ``virtual.*``, and keeps. Evaluation is on real samples either way."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """``sgd`` or ``adam``."""
    lr: Annotated[float, Field(gt=0)] = 0.05
    """Learning rate."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate by round: ``constant``, or ``cosine``, which falls from ``lr`` towards 0 over
    ``num-rounds`` as half a cosine does."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of ``sgd``."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 penalty."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Samples per minibatch."""
    drop_last: bool = False
    """Whether an epoch's last minibatch is left out if it is smaller than the others; not if it is
    the only one."""
    local_epochs: Annotated[int, Field(ge=1)] = 2
    """Passes over the local data per round."""
    proximal_mu: Annotated[float, Field(ge=0)] = 0.0
    """Weight of FedProx's proximal term ``mu/2 ||w - w_t||^2``."""
    kd_lambda: Annotated[float, Field(ge=0)] = 0.0
    """Weight of CADIS's regulariser; the strategy ``cadis`` sets its own."""
    kd_kernel: Kernel = "gaussian"
    """Kernel of that regulariser: ``gaussian`` in the distances of features (the paper, which does
    not say how wide), or ``centred`` on their mean, as wide as their deviation (its published
    code)."""
    class_weights: str = NO_WEIGHTS
    """Weights of classes in the cross-entropy of local training: ``none``, ``balanced`` (by the
    inverse of how many of the samples are of each class, with mean 1 over them, as in
    scikit-learn), or a number for each class in the order of their labels, as in ``1,2.5``.
    Methods whose nodes train on another loss do not read it."""
    feature_layer: str = ""
    """Name of the model's last dense layer, whose input is the features; found if empty."""
    precision: Precision = "float32"
    """``float32``, ``tf32`` (faster on GPUs from Ampere on, products keep 10 bits of mantissa), or
    ``bf16`` (forward pass in bfloat16, weights in float32)."""
    augment: str = "none"
    """Random changes of training images, other ones each time an image is shown: ``none``, ``auto``
    for those that are safe with the data set, or names with commas between them, as in
    ``shift,rotate``: ``shift``, ``scale``, ``rotate``, ``shear``, ``flip``, ``colour``,
    ``cutout``."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of a node's data held out of training to evaluate on."""
    dp_noise: Annotated[float, Field(ge=0)] = 0.0
    """Noise multiplier of DP-SGD (training with differential privacy); 0 turns it off."""
    dp_clip: Annotated[float, Field(gt=0)] = 1.0
    """Maximum norm of each sample's gradient in DP-SGD."""
    dp_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """delta for which a node computes its epsilon; use well below 1 / (its number of samples)."""
    dp_epsilon: Annotated[float, Field(ge=0)] = 0.0
    """Maximum epsilon per node and run; a node that reaches it stops taking part. 0 is no limit."""

    @field_validator("augment")
    @classmethod
    def _names_changes(cls, augment: str) -> str:
        names = {name.strip() for name in augment.split(",")}
        if augment not in ("none", "auto") and not names <= set(CHANGES):
            raise ValueError(
                f'must be "none", "auto", or any of {", ".join(CHANGES)}, with commas between '
                'them, as in "shift,rotate"'
            )
        return augment

    @field_validator("class_weights")
    @classmethod
    def _are_weights(cls, weights: str) -> str:
        if weights not in (NO_WEIGHTS, BALANCED):
            stated_weights(weights)
        return weights

    @field_validator("dp_noise")
    @classmethod
    def _protects_samples(cls, noise: float, info: ValidationInfo) -> float:
        if noise and info.data.get("class_weights") == BALANCED:
            raise ValueError(
                "does not hide how many samples a class has, and "
                'train.class-weights = "balanced" puts that into each step '
                "(state the weights as numbers, or set this to 0)"
            )
        if noise and info.data.get("precision") == "bf16":
            raise ValueError(
                "DP-SGD does not train in bf16 (set train.precision to float32 or tf32, or this "
                "to 0)"
            )
        if noise and info.data.get("on") == "virtual":
            raise ValueError(
                'protects virtual images and not the samples behind them with train.on = "virtual" '
                "(set that to real, or this to 0)"
            )
        return noise

    @field_validator("dp_epsilon")
    @classmethod
    def _limits_something(cls, epsilon: float, info: ValidationInfo) -> float:
        if epsilon and not info.data.get("dp_noise"):
            raise ValueError(
                "needs train.dp-noise above 0: without noise, epsilon is unbounded "
                "(set train.dp-noise to 1.0, or this to 0)"
            )
        return epsilon


class EvaluateSettings(Block):
    """Evaluation on nodes' held-out samples (``evaluate.*``)."""

    counts: bool = False
    """Whether nodes send counts of these by class and prediction, for balanced accuracy, macro F1,
    AUROC, calibration and a confusion matrix. A node's policy decides if they leave. For plain
    evaluations and at most 100 classes."""
    model: str = ""
    """Model that the run evaluates on all nodes, once and without training (``num-rounds = 0``): a
    run's folder, or a ``.safetensors``, ``.onnx`` or ``.pt`` file, on the server. ``flwr-distill
    evaluate`` sets it."""


def stated_weights(text: str) -> list[float]:
    """The numbers of ``train.class-weights``; ValueError if it is something else."""
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if not weights or not all(0 <= weight <= MAX_CLASS_WEIGHT for weight in weights):
        raise ValueError(
            'must be "none", "balanced", or numbers from 0 to 1,000 with commas between them, '
            'as in "1,2.5"'
        )
    if not any(weights):
        raise ValueError('must have a number above 0, as in "1,2.5"')
    return weights


class VirtualSettings(Block):
    """How a node distils the virtual images that it trains on (``virtual.*``)."""

    per_class: Annotated[int, Field(ge=1)] = 10
    """Virtual images of each class on a node."""
    formation: Annotated[int, Field(ge=0, le=4)] = 1
    """Each virtual image holds formation x formation smaller ones, which are enlarged where they
    are trained on; 1 is one image, 0 chooses by image size."""
    first_steps: Annotated[int, Field(ge=1)] = 400
    """Steps in which a node makes its virtual images, with random networks."""
    starts_from: Start = "class-stats"
    """What they start from: noise with the mean and deviation of the class's pixels
    (``class-stats``) or of each pixel (``pixel-stats``), standard ``noise``, or ``real`` images."""
    means_of: MeansOf = "groups"
    """Whose mean features they match: those of ``groups`` of similar images, at most 256 of a
    class, which are augmented alike; or of ``classes``, all images of each as they are."""
    image_optimizer: ImageOptimizer = "adam"
    """What moves their pixels: ``adam``, or ``sgd`` with learning rate 1 and momentum 0.5."""


class SimulationSettings(Block):
    """Virtual nodes, in Flower's simulation runtime (``simulation.*``)."""

    together: Literal["auto", "on", "off"] = "auto"
    """Whether virtual nodes that get the same model train in one step for all of them, up to 50 at
    a time: ``on``, ``off``, or ``auto`` for on where they compute on a GPU."""


class TaskSettings(Block):
    """The task of a federation: data, model, local training."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    dataset: Annotated[str, Field(min_length=1)] = "digits"
    """A named dataset, ``module:function``, or ``private`` if every node has its own."""
    data_root: str = ""
    """Folder of the dataset's files. If empty: the environment's FLWR_DISTILL_DATA_ROOT, else
    ``data``."""
    download: bool = False
    """Let torchvision download missing files."""
    model: Annotated[str, Field(min_length=1)] = "auto"
    """A named model, ``module:Class``, or ``auto``: ``backbone.network`` if that is set, and else
    one that suits the data's kind and size."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of all random draws of the run."""
    norm_threshold: Annotated[float, Field(ge=0)] = 5.0
    """Set an update aside if its norm scores above this, a robust z-score of the logarithm
    (:func:`protocol.outliers.absurdly_large`); 0 accepts any norm."""
    backbone: BackboneSettings = BackboneSettings()
    partition: PartitionSettings = PartitionSettings()
    private: PrivateSettings = PrivateSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    train: TrainSettings = TrainSettings()
    virtual: VirtualSettings = VirtualSettings()
    simulation: SimulationSettings = SimulationSettings()

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, RunConfigValue]) -> Self:
        """Read a Flower run config (``context.run_config``: a flat mapping with dotted keys).

        Raises
        ------
        SettingsError
            Names every key that is unknown, of the wrong type or out of range.
        """
        return cls.checked(nested(run_config), "run config")


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted keys into nested tables: ``{"train.lr": 1}`` -> ``{"train": {"lr": 1}}``."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, last = key.split(".")
        table = nested
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise SettingsError(
                    f"{name} is a setting, not a table", where=key, source="run config"
                )
        table[last] = value
    return nested
