"""The VAE's decode under graphs: the same pixels, whatever flags, dtypes and copies, and an instance that undo leaves as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from purlin_diffusion.pipelines import flux
from torch import Tensor

from purlin_diffusion import ParallelConfig, parallelize
from tests.diffusion.echo import Studio


@pytest.fixture
def pipe() -> Any:
    made = flux.tiny(dtype=torch.float32, device=torch.device("cpu"))
    made.set_progress_bar_config(disable=True)
    return made


def latents(pipe: Any, batch: int = 1, size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(batch + size)
    return torch.randn(batch, pipe.vae.config.latent_channels, size, size, generator=generator)


def decoded(pipe: Any, z: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = pipe.vae.decode(z, return_dict=False)[0]
    return out


def counts(handle: Any) -> tuple[int, int, int]:
    done = handle.decoding.counts()
    return done.captures, done.replays, done.evictions


def test_pictures_are_the_same_and_decoded_by_replays(pipe: Any) -> None:
    def draw(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        call = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 16}
        return pipe("an oak", generator=generator, output_type="pt", **call).images

    ones = [draw(seed) for seed in range(3)]
    before = dict(vars(pipe.vae))
    handle = Studio().open(pipe, devices=2)
    for seed, one in enumerate(ones):
        assert (draw(seed) - one).abs().max() <= 1e-5
    assert counts(handle) == (1, 2, 0) and "1 recorded" in handle.explain().split("vae ")[1].split("\n")[0]
    handle.undo()
    assert vars(pipe.vae) == before and torch.equal(draw(0), ones[0])


CHANGES: list[Callable[[Any], Any]] = [
    lambda vae: vae.enable_tiling(),
    lambda vae: vae.enable_slicing(),
    lambda vae: vae.to(torch.float64),
    lambda vae: setattr(vae.config, "force_upcast", True) or vae.to(torch.bfloat16),
    lambda vae: vae.decoder.conv_out.register_forward_hook(lambda *_: None),
]


@pytest.mark.parametrize("change", CHANGES)
def test_flags_and_dtypes_end_recordings(pipe: Any, change: Callable[[Any], Any]) -> None:
    handle = Studio().open(pipe, devices=1)
    for _ in range(3):
        decoded(pipe, latents(pipe, batch=2))
    assert counts(handle) == (1, 2, 0)
    change(pipe.vae)
    z = latents(pipe, batch=2).to(pipe.vae.dtype)
    first = decoded(pipe, z)
    assert counts(handle) == (1, 2, 1)
    assert all(torch.equal(decoded(pipe, z), first) for _ in range(2)) and counts(handle) == (2, 4, 1)
    handle.undo()
    assert torch.equal(decoded(pipe, z), first)


def test_an_upcast_at_every_picture_never_records(pipe: Any) -> None:
    """As SDXL does with a VAE in half precision: its weights are others each time."""
    handle = Studio().open(pipe, devices=1)
    for _ in range(4):
        pipe.vae.to(torch.float64)
        assert decoded(pipe, latents(pipe).double()).isfinite().all()
        pipe.vae.to(torch.float32)
        pipe.vae.post_quant_conv = copy.deepcopy(pipe.vae.post_quant_conv)
    assert counts(handle) == (0, 0, 0)
    handle.undo()


def test_shapes_have_recordings_of_their_own_and_outputs_are_the_callers(pipe: Any) -> None:
    zs = [latents(pipe), latents(pipe, size=6), latents(pipe, batch=3)]
    wanted = [decoded(pipe, z) for z in zs]
    handle = Studio().open(pipe, devices=1)
    for _ in range(3):
        outs = [decoded(pipe, z) for z in zs]
        assert all(map(torch.equal, outs, wanted))
    assert counts(handle) == (3, 6, 0)
    handle.undo()


def test_a_copy_of_the_vae_decodes_with_weights_of_its_own(pipe: Any) -> None:
    z, handle = latents(pipe), Studio().open(pipe, devices=1)
    one = decoded(pipe, z)
    twin = copy.deepcopy(pipe.vae)
    with torch.no_grad():
        pipe.vae.decoder.conv_out.weight.mul_(-2)
        assert torch.equal(twin.decode(z, return_dict=False)[0], one)
    assert not torch.equal(decoded(pipe, z), one)
    handle.undo()


def test_gradients_pass(pipe: Any) -> None:
    z, handle = latents(pipe).requires_grad_(), Studio().open(pipe, devices=1)
    for _ in range(3):
        pipe.vae.decode(z).sample.sum().backward()
    assert z.grad is not None and counts(handle) == (0, 0, 0)
    handle.undo()


def test_what_cannot_be_recorded_decodes_eagerly_and_says_so(pipe: Any) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("not while capturing")

    z = latents(pipe)
    one = decoded(pipe, z)
    handle = Studio(fails=fail).open(pipe, devices=1)
    assert all(torch.equal(decoded(pipe, z), one) for _ in range(3))
    assert "not while capturing" in handle.explain().split("vae ")[1]
    handle.undo()


@pytest.mark.parametrize("config", [{"vae": False}, {"graph": False}])
def test_a_vae_that_is_not_asked_for_is_let_alone(pipe: Any, config: dict[str, Any]) -> None:
    before = dict(vars(pipe.vae))
    handle = Studio().open(pipe, ParallelConfig(**config), devices=1)
    assert handle.decoding is None and vars(pipe.vae) == before
    handle.undo()


def test_a_vae_that_may_keep_something_between_calls_is_let_alone_and_named(pipe: Any) -> None:
    class Videos(type(pipe.vae)):  # type: ignore[misc]
        pass

    pipe.vae.__class__ = Videos
    handle = Studio().open(pipe, devices=1)
    assert "decode" not in vars(pipe.vae) and "a Videos may keep something" in handle.explain()
    handle.undo()


def test_without_a_gpu_the_vae_is_let_alone(pipe: Any) -> None:
    handle = parallelize(pipe, devices=1)
    assert "decode" not in vars(pipe.vae) and "needs a GPU" in handle.explain().split("vae ")[1]
    handle.undo()
