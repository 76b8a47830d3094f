"""Every error purlin_diffusion raises by name. The message says the call, the argument, what was needed, what came, and the cure."""

from __future__ import annotations

from purlin_core.errors import PurlinError


class ConfigError(PurlinError, ValueError):
    """A ParallelConfig, or arguments of parallelize, that mean nothing together."""


class NotBuiltError(PurlinError, NotImplementedError):
    """A mode that the design names and this version does not hold yet; the message says what there is."""


class UnsupportedModelError(PurlinError, TypeError):
    """No plan fits this model or pipeline; the message lists those that have one."""


class PlanError(PurlinError, ValueError):
    """A plan that cannot be read, or that does not fit the class it was written for."""


class ArgumentError(PurlinError, ValueError):
    """An argument of a denoiser's forward that its plan refuses or does not know."""


class PlacementError(PurlinError, RuntimeError):
    """A model that something else has a hand on: a device map, an offload, another parallelism, hooks that ranks cannot share."""


class AlreadyParallelError(PurlinError, RuntimeError):
    """parallelize on a model that is parallel already."""


class InputsDifferError(PurlinError, ValueError):
    """Ranks called the denoiser with inputs of different structure. Raised on all of them; the next call works."""


class LaunchError(PurlinError, RuntimeError):
    """Ranks that could not be started, or one that ended without a word."""


class RankError(PurlinError, RuntimeError):
    """Another rank raised; its exception is the cause. `rank` says which one."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
