"""Which model classes have a plan. `register` adds one; a user's plan takes the place of ours."""

from __future__ import annotations

from torch import nn

from purlin_diffusion.errors import UnsupportedModelError
from purlin_diffusion.models import PLANS
from purlin_diffusion.plan import Plan

_plans: dict[str, Plan] = {plan.model: plan for plan in PLANS}  # the one table that register() writes


def register(plan: Plan) -> None:
    """Make `plan` the plan of its model class, in this process. It is checked against the class when a model of it is parallelized."""
    _plans[plan.model] = plan


def supported() -> list[str]:
    """Names of the model classes that have a plan."""
    return sorted(_plans)


def plan_of(model: nn.Module) -> Plan:
    """The plan of `model`'s class, or of a base whose forward it inherits. Raises UnsupportedModelError."""
    kind = type(model)
    for base in kind.__mro__:
        if (plan := _plans.get(base.__name__)) is None:
            continue
        if base is not kind and getattr(base, "forward", None) is not kind.forward:
            raise UnsupportedModelError(
                f"parallelize: `{kind.__name__}` overrides the forward of {base.__name__}, so that plan says nothing of it."
                " Register a plan for it with purlin_diffusion.register(plan)."
            )
        return plan
    raise UnsupportedModelError(
        f"parallelize: no plan for `{kind.__name__}`. Supported: {', '.join(supported())}."
        " Add it with purlin_diffusion.register(plan); a model's plan is one file of data, see purlin_diffusion/models."
    )
