"""One call makes a diffusers pipeline run on several devices: `handle = purlin_diffusion.parallelize(pipe, devices=2)`."""

from purlin_diffusion.config import ParallelConfig
from purlin_diffusion.errors import (
    AlreadyParallelError,
    ArgumentError,
    ConfigError,
    InputsDifferError,
    LaunchError,
    NotBuiltError,
    PlacementError,
    PlanError,
    RankError,
    UnsupportedModelError,
)
from purlin_diffusion.handle import Handle
from purlin_diffusion.launch import launch
from purlin_diffusion.parallelize import parallelize
from purlin_diffusion.plan import Plan, Refusal, Segment
from purlin_diffusion.registry import register, supported

__all__ = [
    "AlreadyParallelError",
    "ArgumentError",
    "ConfigError",
    "Handle",
    "InputsDifferError",
    "LaunchError",
    "NotBuiltError",
    "ParallelConfig",
    "PlacementError",
    "Plan",
    "PlanError",
    "RankError",
    "Refusal",
    "Segment",
    "UnsupportedModelError",
    "launch",
    "parallelize",
    "register",
    "supported",
]
