"""What the commands that draw pictures share: their arguments, checked before any rank is started."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, get_args

from purlin_diffusion.commands.exits import InputError

Mode = Literal["single", "processes", "threads", "launched"]
Dtype = Literal["float32", "float16", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]

MAX_RANKS = 16  # csrc/purlin/moves.hpp
APART = ("processes", "launched")  # modes whose ranks are processes


@dataclass(frozen=True)
class Options:
    """One picture and how to draw it. None leaves the choice to the model's defaults. Sent to every rank."""

    model: str
    ranks: int
    mode: Mode
    device: Device
    prompt: str
    seed: int
    images: int
    steps: int | None
    height: int | None
    width: int | None
    guidance: float | None
    attention: str
    backend: str
    dtype: Dtype | None


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="digits", help="digits | PATH | HUB_ID | random:NAME | tiny:NAME (default: digits)"
    )
    parser.add_argument("--prompt", default="digit three", help="what to draw")
    parser.add_argument("--ranks", type=int, help="ranks that draw together (default: torchrun's, else 1)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--processes",
        dest="mode",
        action="store_const",
        const="processes",
        help="a process a rank (default, but where there are GPUs and fewer than ranks)",
    )
    place.add_argument(
        "--threads", dest="mode", action="store_const", const="threads", help="ranks are threads of this process"
    )
    parser.add_argument(
        "--device",
        choices=get_args(Device),
        default="auto",
        help="where ranks compute (default: auto, GPUs where there are any; threads share one where there are fewer than ranks)",
    )
    parser.add_argument(
        "--attention", default="auto", help="auto | gather_kv | ulysses: by tokens, guidance too (default: auto)"
    )
    parser.add_argument("--dtype", choices=get_args(Dtype), help="of the weights (default: the model's)")
    parser.add_argument("--steps", type=int, help="denoising steps")
    parser.add_argument("--height", type=int, help="pixels")
    parser.add_argument("--width", type=int, help="pixels")
    parser.add_argument("--guidance", type=float, help="guidance scale")
    parser.add_argument("--seed", type=int, default=0, help="of the first noise, 0 to 2**63 - 1 (default: 0)")


def read_options(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Options:
    """Raises InputError."""
    ranks, mode = read_ranks(args.ranks, args.mode, environment)
    if mode == "processes" and args.mode is None and gpus() < ranks and may_share(args.device):
        mode = "threads"  # which alone can share a GPU
    options = Options(
        model=args.model,
        ranks=ranks,
        mode=mode,
        device=args.device,
        prompt=args.prompt,
        seed=args.seed,
        images=getattr(args, "images", 1),
        steps=args.steps,
        height=args.height,
        width=args.width,
        guidance=args.guidance,
        attention=args.attention,
        backend=getattr(args, "backend", "auto"),
        dtype=args.dtype,
    )
    for name in ("images", "steps", "height", "width"):
        check_count(f"--{name}", getattr(options, name))
    check_seed(options.seed)
    check_guidance(options.guidance)
    check_device(options)
    check_config(options)
    check_model(options.model)
    return options


def read_ranks(ranks: int | None, mode: Mode | None, environment: Mapping[str, str]) -> tuple[int, Mode]:
    """How many ranks, and how they come to be. torchrun has said both."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        world = int(environment["WORLD_SIZE"])
        if mode == "threads" or ranks not in (None, world):
            raise InputError(
                f"a launcher started {world} ranks; leave --ranks and --threads out, or do without the launcher"
            )
        return world, "launched" if world > 1 else "single"
    check_count("--ranks", ranks)
    ranks = ranks or 1
    if ranks > MAX_RANKS:
        raise InputError(f"--ranks needs 1 to {MAX_RANKS}; got {ranks}")
    return ranks, "single" if ranks == 1 else mode or "processes"


def gpus() -> int:
    """How many torch sees."""
    import torch

    return torch.cuda.device_count()


def may_share(device: Device) -> bool:
    """Whether threads share a GPU where there are fewer than ranks: purlin alone can carry their exchanges."""
    return device == "cuda" or (device == "auto" and gpus() > 0 and find_spec("purlin_core._cuda") is not None)


def check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InputError(f"{name} needs 1 or more; got {value}")


def check_seed(value: int) -> None:
    if not 0 <= value < 2**63:
        raise InputError(f"--seed needs 0 to {2**63 - 1}; got {value}")


def check_guidance(value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise InputError(f"--guidance needs a finite number; got {value}")


def check_size(pipe: Any, arguments: Mapping[str, Any], option: str = "") -> None:
    """Raise InputError for a height or width that `pipe` cannot draw, and would round. `option`: that which named both, if one did."""
    multiple = size_multiple(pipe)
    for name in ("height", "width"):
        asked = arguments.get(name)
        if asked is not None and asked % multiple:
            below = asked - asked % multiple
            near = " or ".join(str(size) for size in (below, below + multiple) if size)
            raise InputError(
                f"{option or f'--{name}'} needs a multiple of {multiple} pixels for {type(pipe).__name__}; got {asked}, near which is {near}"
            )


def size_multiple(pipe: Any) -> int:
    """Pixels of a token's side: FLUX tells its image processor, which rounds to them; SD3 has a patch size, in latents. 1 where none is known."""
    processor = getattr(getattr(pipe, "image_processor", None), "config", None)
    rounds_to = getattr(processor, "vae_scale_factor", 1)
    latent, patch = getattr(pipe, "vae_scale_factor", 1), getattr(pipe, "patch_size", 1)
    return int(max(rounds_to, latent * patch))


def check_device(options: Options) -> None:
    if options.device != "cuda":
        return
    if options.mode in APART and gpus() < options.ranks:
        cure = ", or leave --processes out: threads share one" * (options.mode == "processes" and gpus() > 0)
        raise InputError(f"--device cuda needs a GPU a rank, {options.ranks}; torch sees {gpus()}{cure}")
    if gpus() == 0:
        raise InputError("--device cuda needs a GPU; torch sees none: `python -m purlin_diffusion doctor` says why")


def check_config(options: Options) -> None:
    try:
        parallel_config(options).degrees(options.ranks)
    except (ValueError, NotImplementedError) as error:
        raise InputError(str(error)) from error


def check_model(model: str) -> None:
    from purlin_diffusion.pipelines import check

    try:
        check(model)
    except ValueError as error:
        raise InputError(f"--model {error}") from error


def parallel_config(options: Options) -> Any:
    """Raises ConfigError, a ValueError."""
    from purlin_diffusion import ParallelConfig

    words: dict[str, Any] = {"attention": options.attention, "backend": options.backend}
    return ParallelConfig(**words)
