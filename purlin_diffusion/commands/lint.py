"""What in a pipeline's denoiser and VAE would forbid CUDA graphs: a table of host syncs and copies with their place in the code. Needs no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from purlin_diffusion.commands.exits import DONE, FAILED, InputError, ended

if TYPE_CHECKING:
    from purlin_diffusion.graph.lint import Finding

STEPS = 2  # what the first step alone does is no matter: it runs eagerly


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="digits | PATH | HUB_ID | random:NAME | tiny:NAME, on the CPU: a tiny one says as much",
    )
    parser.add_argument("--prompt", default="digit three", help="what to draw")


def run(args: argparse.Namespace) -> int:
    """0 when nothing was found, 1 when something was, 2 when there is no such model."""
    return ended("lint", lambda: _run(args.model, args.prompt))


def _run(model: str, prompt: str) -> int:
    import diffusers
    import transformers

    from purlin_diffusion import pipelines

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    try:
        pipe = pipelines.load(model)
    except pipelines.UnknownPipelineError as error:
        raise InputError(f"MODEL {error}") from error
    except OSError as error:  # a hub id that cannot be had, a folder that holds no pipeline
        raise InputError(f"MODEL {model}: {str(error).strip().splitlines()[0]}") from error
    found = examine(pipe, {**pipelines.defaults(model), "prompt": prompt, "num_inference_steps": STEPS})
    print(table(found))
    for name, text in words(pipe).items():
        print(f"{name}: {text}")
    return FAILED if any(found.values()) else DONE


def examine(pipe: Any, call: dict[str, Any]) -> dict[str, dict[Finding, int]]:
    """What the last call of each part of a pipeline that is recorded does, by the part's name."""
    from purlin_diffusion.graph.lint import lint
    from purlin_diffusion.placement import denoisers

    found: dict[str, dict[Finding, int]] = {}

    def watched(part: Any, name: str, below: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **kwargs: Any) -> Any:
            results: list[Any] = []
            found[name] = lint(part, lambda: results.append(below(*args, **kwargs)))
            return results[0]

        return watch

    pipe.set_progress_bar_config(disable=True)
    parts = [(model, "forward") for model in denoisers(pipe)]
    if getattr(pipe, "vae", None) is not None:
        parts.append((pipe.vae, "decode"))
    for part, method in parts:
        setattr(part, method, watched(part, f"{type(part).__name__}.{method}", getattr(part, method)))
    try:
        pipe(**call, output_type="pt")
    finally:
        for part, method in parts:
            delattr(part, method)
    return found


def words(pipe: Any) -> dict[str, str]:
    """What the plans of a pipeline's denoisers say of graphs."""
    from purlin_diffusion.errors import UnsupportedModelError
    from purlin_diffusion.placement import denoisers
    from purlin_diffusion.registry import plan_of

    said = {}
    for model in denoisers(pipe):
        try:
            said[type(model).__name__] = f"its plan says graph: {plan_of(model).graph}"
        except UnsupportedModelError:
            said[type(model).__name__] = "no plan yet"
    return said


def table(found: Mapping[str, Mapping[Finding, int]]) -> str:
    """A row a place, part by part."""
    rows = [("kind", "times", "what", "module", "place")]
    lines = []
    for part, findings in found.items():
        lines.append(f"{part}: {'nothing that forbids a graph' if not findings else f'{len(findings)} places'}")
        rows += [(each.kind, f"{times}x", each.what, each.module, each.place) for each, times in findings.items()]
    if len(rows) == 1:
        return "\n".join(lines)
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    body = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows]
    return "\n".join([*lines, "", *body])
