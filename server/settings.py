"""Settings of a run: run-config keys with types, bounds and defaults."""

from collections.abc import Mapping
from functools import lru_cache
from logging import INFO
from typing import Annotated, Any, ClassVar, Literal

from flwr.common import log
from pydantic import ConfigDict, Field, ValidationInfo, create_model, field_validator

from flwr_distill.links.masks import MAX_VALUE
from flwr_distill.links.records import LinkMode
from flwr_distill.protocol.arguments import method_settings, read_arguments
from flwr_distill.protocol.coded import DownSetting, UpSetting
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import all_methods
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import Block, RunConfigValue, TaskSettings, nested


class RunSettings(TaskSettings):
    """All settings of a run."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    strategy: Annotated[str, Field(min_length=1)] = "hfldd"
    """Name of a built-in or installed method, or ``module:Class``."""
    strategy_args: str = ""
    """JSON object of constructor arguments of the strategy that are no settings, or of the method's
    settings, ``{"mu": 5.0}``: Flower's own command takes those of plug-ins here."""
    aggregator: str = ""
    """Strategy that replaces the weighted mean of models: ``agreement``, ``krum``, ``multikrum``,
    ``bulyan``, ``fedtrimmedavg``, ``fedmedian`` or your own; for HFLDD, FedLGD and MOON."""
    aggregator_args: str = ""
    """JSON object of the aggregator's constructor arguments, ``{"num_malicious_nodes": 2}``."""
    defence: Literal["off", "on"] = "off"
    """``on`` where nodes may be hostile: sets the method's rules against them, unless they are set
    already (`protocol.method.Method.defaults`)."""
    most_samples: Annotated[float, Field(ge=0)] = 10.0
    """Most samples of a node that count, in units of the median of all connected nodes': a node
    says itself how many it has. Fewer count where nodes differ less than that: one robust standard
    deviation above the median, but at least 1.5 times as many. 0 counts all."""
    start: str = ""
    """Strategy that makes the model which training starts from, in one phase before the first
    round: ``analytic``. Empty starts from weights that ``seed`` draws."""
    secure_sums: bool = False
    """Whether the server sees only the sum of the models that nodes train, and no single one; so
    with means of their tables' columns. For strategies that need no more, with 3 to 100 nodes in a
    round. A third of them may be lost."""
    secure_sums_norm: Annotated[float, Field(gt=0, le=MAX_VALUE)] = 1000.0
    """L2 norm to which nodes shorten a longer update in secure sums, where the server cannot judge
    it (``norm-threshold``)."""
    statistics: bool = False
    """Whether the run asks nodes for counts of their data and trains nothing (``num-rounds = 0``);
    nodes' policies decide, and round them. ``flwr-distill stats`` sets it."""
    num_rounds: Annotated[int, Field(ge=0, validate_default=True)] = 10
    """Rounds, T in the papers; 0 with ``evaluate.model`` or ``statistics``."""
    min_nodes: Annotated[int, Field(ge=1)] = 2
    """Nodes to wait for before the run starts."""
    fraction_train: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the nodes that train each round, for strategies that sample."""
    fraction_evaluate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the nodes that evaluate each round on their held-out samples (``train.holdout``);
    where nodes keep models of their own, 0 has all evaluate: there is no other accuracy."""
    best_metric: Literal["accuracy", "balanced-accuracy", "macro-f1", "auroc", "loss", "ece"] = (
        "accuracy"
    )
    """Metric by which a round is the best one: its checkpoint is kept, report and card name it, and
    ``flwr-distill runs export --best`` takes it. Smaller ``loss`` and ``ece`` (calibration error)
    are better. Of the server's test samples; without any, of nodes' (``evaluate.counts``)."""
    phase_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a phase ends without the nodes that have not replied."""
    quorum: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the nodes in a training phase that must send a usable reply in time; otherwise the
    run ends with an error. Phases in which single nodes work for others (distilling, averaging a
    sector), and evaluation, have no quorum."""
    buffer: Annotated[int, Field(ge=0)] = 0
    """Usable replies with which a round of training ends, K of FedBuff. Nodes that still train
    count in a later round, by their updates and for less. 0 waits for all. For methods that need
    only the mean of the nodes' models."""
    max_staleness: Annotated[int, Field(ge=0)] = 10
    """Rounds by which a reply may be late with ``buffer``; later ones are rejected."""
    down_codec: DownSetting = "float32"
    """How models travel to nodes: ``float16``, ``bfloat16``, ``int8`` or ``int4`` (a scale a
    channel, random rounding), or as the difference to the model that the node has, with ``delta-``
    before a name. ``float32`` is exact. ``auto`` is the smallest that costs under half a point on
    nodes' held-out samples, and ``float32`` where all nodes are on loopback."""
    up_codec: UpSetting = "float32"
    """How nodes send what training changed in the model: as above, or ``topk``, the largest
    three tenths, with what was left out added the next time. ``auto`` as above."""
    patience_failed: Annotated[int, Field(ge=1)] = 2
    """Failed rounds in a row after which the run ends with an error. A round has failed if no node
    sent anything usable, so that the model stayed as it was."""
    server_device: Annotated[str, Field(min_length=1)] = "auto"
    """Where the server evaluates and distils: ``cpu``, ``cuda``, ``cuda:N``, or ``auto`` for its
    first GPU, else its CPU. Nodes have their own (``flwr-distill node --device``)."""
    links: LinkMode = "auto"
    """How nodes send to each other: ``relay`` (sealed, through the server), ``direct`` (from node
    to node) or ``auto`` (directly if possible)."""
    runs_dir: Annotated[str, Field(min_length=1)] = "runs"
    """Folder for results, relative to the ServerApp's working directory."""
    resume: str = ""
    """Id of a run in ``runs-dir``, or ``latest``, to resume from its last checkpoint."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Checkpoints to keep: those of the last rounds, plus that of the best round."""
    hooks: str = ""
    """Hooks that see this run, separated by commas: the trackers ``mlflow`` and ``wandb``, names of
    installed ones, or ``module:object`` (docs/plugins.md)."""
    queue_id: Annotated[str, Field(max_length=64)] = ""
    """Name by which the queue finds this run again; ``flwr-distill run --queue`` sets it."""
    edge: str = ""
    """Socket at which this run answers for an edge, in place of rounds of its own; ``flwr-distill
    edge`` sets it."""

    @field_validator("num_rounds")
    @classmethod
    def _trains_or_evaluates(cls, rounds: int, info: ValidationInfo) -> int:
        evaluates = bool("evaluate" in info.data and info.data["evaluate"].model)
        if evaluates and info.data.get("statistics"):
            raise ValueError("evaluate.model and statistics are of two runs: drop one")
        if evaluates and rounds:
            raise ValueError("must be 0 with evaluate.model, which is evaluated and not trained")
        if info.data.get("statistics") and rounds:
            raise ValueError("must be 0 with statistics, which trains nothing")
        if not (evaluates or info.data.get("statistics") or rounds):
            raise ValueError("must be >= 1, but for evaluate.model and statistics")
        return rounds

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, RunConfigValue]) -> "RunSettings":
        """Read a Flower run config with the tables of all methods; SettingsError on bad keys."""
        return composed_settings().checked(nested(run_config), "run config")

    def defended(self, method: Method | None) -> "RunSettings":
        """These settings with a method's rules against hostile nodes, if ``defence`` is on.

        Raises SettingsError if the method has none.
        """
        if self.defence == "off":
            return self
        rules = dict(method.defaults.get("defence", {})) if method else {}
        if method and "strategy" in rules and self.strategy != method.name:
            rules = {}  # a class of one's own is not replaced
        if not rules:
            known = ", ".join(
                sorted(name for name, m in all_methods().items() if "defence" in m.defaults)
            )
            raise SettingsError(
                f"strategy = {self.strategy!r} declares no rules against hostile nodes",
                where="defence",
                value="on",
                remedy=f"take one of {known}, or set an aggregator",
            )
        log(INFO, 'defence = "on": %s', ", ".join(f"{key} = {rules[key]!r}" for key in rules))
        values = nested(rules)
        own = self.model_dump(by_alias=True, exclude_defaults=True)
        if "strategy" in values:
            del own["strategy"]
        for key, value in own.items():
            is_table = isinstance(value, dict)
            values[key] = {**values.get(key, {}), **value} if is_table else value
        return type(self).checked(values, "run config")

    def of_method(self, method: Method | None) -> Block | None:
        """Settings of a method: its table, overridden by ``strategy-args``; may be refused."""
        if method is None or method.settings is None:
            return None
        table: Block = getattr(self, _attribute(method), None) or method.settings()
        return method_settings(method, table.model_dump(by_alias=True), self.strategy_args)

    def unread(self, *methods: Method | None) -> list[str]:
        """Keys of other methods' tables that are not at their defaults: these methods ignore them.

        A method that may leave the run to another one declares all its phases, and reads its table.
        """
        running = [method for method in methods if method]
        phases = {phase.message_type for method in running for phase in method.phases}
        read = {
            other.table_name
            for other in all_methods().values()
            if other.phases and phases.issuperset(phase.message_type for phase in other.phases)
        }.union(method.table_name for method in running)
        others = {method.table_name for method in all_methods().values() if method.settings} - read
        own = self.model_dump(by_alias=True, exclude_defaults=True)
        return [f"{name}.{key}" for name in sorted(others) for key in own.get(name, {})]

    def constructor_arguments(self, method: Method | None) -> dict[str, Any]:
        """Keys of ``strategy-args`` that are not settings of the method."""
        fields = set(method.settings.model_fields) if method and method.settings else set()
        arguments = read_arguments(self.strategy_args, "strategy-args")
        return {k: value for k, value in arguments.items() if k.replace("-", "_") not in fields}


def composed_settings(methods: Mapping[str, Method] | None = None) -> type[RunSettings]:
    """Class of settings with a table for each method; None means all installed methods."""
    tables: dict[str, type[Block]] = {}
    for method in (all_methods() if methods is None else methods).values():
        if (block := method.settings) is None:
            continue
        name = _attribute(method)
        if name in RunSettings.model_fields or tables.get(name, block) is not block:
            raise SettingsError(
                f"the name of its table, {method.table_name}, is taken by other settings",
                where=f"method {method.name!r} of {method.package}",
                remedy="choose another",
            )
        tables[name] = block
    return _with_tables(tuple(tables.items()))


@lru_cache(maxsize=4)
def _with_tables(tables: tuple[tuple[str, type[Block]], ...]) -> type[RunSettings]:
    fields: dict[str, Any] = {name: (block, block()) for name, block in tables}
    return create_model("RunSettings", __base__=RunSettings, **fields)


def default_settings() -> dict[str, Any]:
    """All settings at their defaults, in nested tables."""
    return composed_settings()().model_dump(by_alias=True)


def _attribute(method: Method) -> str:
    return method.table_name.replace("-", "_")
