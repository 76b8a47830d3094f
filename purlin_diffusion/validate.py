"""A plan against the live model: every path exists, every argument of the forward is classified, every block class is there, and no two paths say
something of one thing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from torch import nn

from purlin_diffusion.arguments import forward_signature
from purlin_diffusion.errors import PlanError
from purlin_diffusion.paths import modules_at
from purlin_diffusion.plan import OPTIONAL, OUTPUT, Plan


def validate(plan: Plan, model: nn.Module) -> None:
    """Raise PlanError when `plan` does not fit `model`; nothing has been installed then."""
    _check_said_once(plan, model)
    faults = [*_argument_faults(plan, model), *_path_faults(plan, model), *_block_faults(plan, model)]
    if faults:
        raise PlanError(
            f"plan {plan.model}: written for diffusers {plan.written_for}, does not fit the class in diffusers {_diffusers_version()}:"
            f" {'; '.join(faults)}. Use diffusers {plan.written_for}, or register a plan for this version."
        )


def _argument_faults(plan: Plan, model: nn.Module) -> list[str]:
    takes = set(forward_signature(type(model)).parameters)
    says = set(plan.forward) | {name for name in plan.refuse if "." not in name}
    faults = [f"forward takes `{name}`, which the plan does not classify" for name in sorted(takes - says)]
    return faults + [f"forward takes no `{name}`" for name in sorted(says - takes)]


def _path_faults(plan: Plan, model: nn.Module) -> list[str]:
    paths = [*(door.path for door in plan.doors), *plan.exits, *plan.calls]
    faults = [
        f"there is no module `{path}`" for path in paths if not path.endswith(OPTIONAL) and not modules_at(model, path)
    ]
    for path in plan.calls:
        faults += [
            f"`{name}` has no attention processor"
            for name, module in modules_at(model, path)
            if getattr(module, "processor", None) is None
        ]
    for door in plan.doors:
        for name, module in [] if door.outputs else modules_at(model, door.path):
            takes = forward_signature(type(module)).parameters
            faults += [f"`{name}` takes no argument `{argument}`" for argument in door.entries if argument not in takes]
    return faults


def _block_faults(plan: Plan, model: nn.Module) -> list[str]:
    there = {type(module).__name__ for module in model.modules()}
    return [f"there is no block `{block}`" for block in plan.blocks if block not in there]


def _check_said_once(plan: Plan, model: nn.Module) -> None:
    """Two paths of a plan may meet at one module, but not at one thing there."""
    said = [(f"input `{name}`", door.path) for door in plan.doors if not door.outputs for name in door.entries]
    said += [(f"output {name}", f"{door.path}{OUTPUT}") for door in plan.doors if door.outputs for name in door.entries]
    said += [("output 0", path) for path in plan.exits] + [("attention", path) for path in plan.calls]
    seen: dict[tuple[str, str], str] = {}
    for what, path in said:
        for name, _ in modules_at(model, path.removesuffix(OUTPUT)):
            before = seen.setdefault((what, name), path)
            if before != path:
                raise PlanError(
                    f"plan {plan.model}: {what} of `{name}` is said twice, by `{before}` and `{path}`. Leave one of them out."
                )


def _diffusers_version() -> str:
    try:
        return version("diffusers")
    except PackageNotFoundError:
        return "unknown"
