"""Settings of a strategy, and what a run of our ServerApp makes it of."""

from typing import Any, ClassVar, Self

from flwr.serverapp.strategy import Strategy

from flwr_distill.strategies.common.run import Run
from flwr_distill.task.settings import Block


class Configured(Strategy):
    """A strategy that keeps the settings of its method.

    A class declares them by an attribute of that name, which has the defaults::

        class Fall(CheckedFedAvg):
            settings: FallSettings = FallSettings()

    ``Fall(by=0.5)`` and ``Fall(settings=FallSettings(by=0.5))`` are the same.

    Parameters
    ----------
    settings : Block, optional (default: None)
        Of the declared class; None takes the defaults.
    **kwargs
        Fields of the settings, which take precedence, and arguments of the next base class.

    Attributes
    ----------
    settings : Block
        As declared; without fields if a class declares none.
    run_arguments : tuple[str, ...]
        Fields of :class:`strategies.common.run.Run` that the constructor takes.

    Raises
    ------
    SettingsError
        If a field is of the wrong type or out of range; names it.
    """

    settings: Any = Block()
    run_arguments: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, settings: Block | None = None, **kwargs: Any) -> None:
        name, declared = type(self).__name__, type(type(self).settings)
        self.settings = settings or type(self).settings
        if not isinstance(self.settings, declared):
            found = type(self.settings).__name__
            raise TypeError(f"{name}: settings must be {declared.__name__}, got {found}")
        fields = type(self.settings).model_fields.items()
        own = {field.alias or key: kwargs.pop(key) for key, field in fields if key in kwargs}
        if own:
            values = {**self.settings.model_dump(by_alias=True), **own}
            self.settings = type(self.settings).checked(values, name)
        super().__init__(**kwargs)

    @classmethod
    def from_run(cls, settings: Any, run: Run, **arguments: Any) -> Self:
        """Make the strategy for a run of our ServerApp.

        Parameters
        ----------
        settings : Block, optional
            The method's; passed to the constructor by name.
        run : Run
            The run.
        **arguments
            Further constructor arguments, which take precedence.
        """
        own = settings.model_dump() if settings else {}
        from_run = {name: getattr(run, name) for name in cls.run_arguments}
        return cls(**{**run.sampling, **from_run, **own, **arguments})
