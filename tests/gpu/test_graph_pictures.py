"""CUDA graphs of the denoiser and the VAE's decode: pictures by replays are those drawn eagerly, whatever changes; undo gives the memory back."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from purlin_core import Communicator, LocalWorld
from purlin_core.errors import PurlinError
from purlin_diffusion import ConfigError, Handle, ParallelConfig, launch, parallelize
from tests.gpu.test_pictures import FAMILIES, GPU, TOLERANCE, built, difference, draw, sharing

pytestmark = pytest.mark.gpu

STEPS = 4
RECORDED = sorted(set(FAMILIES) - {"qwenimage"})  # its plan says why not
RANKS = [1, 2, 3]


@pytest.fixture(autouse=True)
def _exact_convolutions() -> Iterator[None]:
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


def opened(pipe: Any, ranks: int, **config: Any) -> Handle:
    config = {"graph": True, "timeout": 60, **config}
    return parallelize(pipe, ParallelConfig(**config), devices=sharing(ranks))


def done(handle: Handle) -> tuple[int, int, int]:
    """Captures, replays, evictions; the same on every rank."""
    (alike,) = {(each.graphs.captures, each.graphs.replays, each.graphs.evictions) for each in handle.counters}
    return alike


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mode", ["gather_kv", "ulysses", "auto"])
@pytest.mark.parametrize("family", RECORDED)
def test_pictures_by_replays_are_the_same(family: str, mode: str, ranks: int) -> None:
    pipe = built(family)
    wanted = [draw(pipe, seed=seed, num_inference_steps=STEPS) for seed in range(2)]
    handle = opened(pipe, ranks, attention=mode)
    for seed in range(2):
        assert difference(draw(pipe, seed=seed, num_inference_steps=STEPS), wanted[seed]) <= TOLERANCE, handle.explain()
    assert done(handle) == (1, 2 * STEPS - 1, 0), handle.explain()
    assert [each.calls for each in handle.counters] == [2 * STEPS] * ranks
    halves = family != "flux" and ranks == 2 and mode == "auto"  # guidance in one batch
    assert [each.halved for each in handle.counters] == [2 * STEPS * halves] * ranks
    assert handle.counters[0].graphs.pool_bytes > 0 and handle.counters[0].graphs.capture_ms > 0
    assert difference(wanted[0], wanted[1]) > 0.1
    handle.undo()
    assert torch.equal(draw(pipe, num_inference_steps=STEPS), wanted[0])


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_auto_records_on_one_gpu_alone_and_says_so(family: str, caplog: pytest.LogCaptureFixture) -> None:
    pipe = built(family, torch.bfloat16)
    one = draw(pipe, num_inference_steps=STEPS)
    with caplog.at_level("WARNING", logger="purlin_diffusion"):
        handle = parallelize(pipe)
    (line,) = (record.getMessage() for record in caplog.records)
    assert "one rank has nothing to exchange" in line and "CUDA graphs" in line
    for _ in range(2):
        assert difference(draw(pipe, num_inference_steps=STEPS), one) <= 1e-2
    assert done(handle) == (1, 2 * STEPS - 1, 0), handle.explain()
    handle.undo()


@pytest.mark.parametrize("ranks", RANKS)
def test_sizes_and_batches_take_turns(ranks: int) -> None:
    pipe = built("flux")
    calls: list[dict[str, Any]] = [
        {},
        {"width": 64},
        {"num_images_per_prompt": 2},
        {"max_sequence_length": 17},
        {"height": 96},
    ]
    wanted = [draw(pipe, **call) for call in calls]
    handle = opened(pipe, ranks, graph_keys=3)
    for _ in range(3):
        for call, one in zip(calls, wanted, strict=True):
            assert difference(draw(pipe, **call), one) <= TOLERANCE, handle.explain()
    captures, replays, evictions = done(handle)
    assert captures > 5 and evictions == captures - 3 and replays > captures
    handle.undo()


def scaled_in_place(model: Any) -> None:
    model.proj_out.weight.mul_(-0.5)


def new_weight(model: Any) -> None:
    model.proj_out.weight = nn.Parameter(model.proj_out.weight.detach() * -0.5)


def there_and_back(model: Any) -> None:
    model.to("cpu")
    torch.cuda.empty_cache()
    model.proj_out.weight.mul_(-0.5)
    model.to(GPU)


def new_processors(model: Any) -> None:
    model.set_attn_processor(type(next(iter(model.attn_processors.values())))())
    scaled_in_place(model)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("change", [scaled_in_place, new_weight, there_and_back, new_processors])
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_a_change_ends_the_recording(family: str, change: Callable[[Any], None], ranks: int) -> None:
    pipe = built(family)
    handle = opened(pipe, ranks)
    before = draw(pipe, num_inference_steps=STEPS)
    assert done(handle) == (1, STEPS - 1, 0)
    with torch.no_grad():
        change(pipe.transformer)
    after = draw(pipe, num_inference_steps=STEPS)
    assert done(handle) == (2, 2 * (STEPS - 1), 1), handle.explain()
    handle.undo()
    assert difference(after, before) > 0.1
    assert difference(after, draw(pipe, num_inference_steps=STEPS)) <= TOLERANCE


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adapter_may_be_loaded_scaled_and_unloaded(ranks: int) -> None:
    peft = pytest.importorskip("peft")
    pipe, plain = built("flux"), built("flux")
    handle = opened(pipe, ranks)
    one = draw(pipe, num_inference_steps=STEPS)
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_v", "proj_out"], init_lora_weights=False)
    for each in (pipe, plain):
        torch.manual_seed(0)
        each.transformer.add_adapter(config, "wood")
        for name, module in each.transformer.named_modules():
            if "lora_" in name and isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.5, generator=torch.Generator(GPU).manual_seed(len(name)))
    for scale in (1.0, 0.3):
        for each in (pipe, plain):
            each.transformer.set_adapters(["wood"], [scale])
        got, wanted = (draw(each, num_inference_steps=STEPS) for each in (pipe, plain))
        assert difference(got, wanted) <= TOLERANCE and difference(got, one) > 1e-3
    for each in (pipe, plain):
        each.transformer.delete_adapters(["wood"])
    assert difference(draw(pipe, num_inference_steps=STEPS), one) <= TOLERANCE
    assert done(handle)[0] == 4 and done(handle)[2] == 3
    handle.undo()


@pytest.mark.parametrize("ranks", [1, 2])
def test_guidance_by_two_calls_and_a_callback_that_changes_latents(ranks: int) -> None:
    def shaken(pipe: Any, step: int, time: Any, kept: dict[str, Any]) -> dict[str, Any]:
        return {"latents": kept["latents"] * (1 + 0.1 * step)}

    call = {
        "true_cfg_scale": 2.0,
        "negative_prompt": "steel",
        "num_inference_steps": STEPS,
        "callback_on_step_end": shaken,
    }
    pipe = built("flux")
    one = draw(pipe, **call)
    handle = opened(pipe, ranks)
    for _ in range(2):
        assert difference(draw(pipe, **call), one) <= TOLERANCE
    assert done(handle) == (1, 4 * STEPS - 1, 0)
    handle.undo()


def test_offload_stays_eager_and_says_why() -> None:
    pipe = built("flux")
    one = draw(pipe, num_inference_steps=STEPS)
    handle = opened(pipe, 1)
    pipe.enable_model_cpu_offload(device=GPU)
    assert difference(draw(pipe, num_inference_steps=STEPS), one) <= TOLERANCE
    assert done(handle) == (0, 0, 0) and "hooked into its modules" in handle.explain()
    handle.undo()


def test_inference_mode_and_autocast_are_calls_of_their_own() -> None:
    pipe = built("sd3")
    around = (torch.inference_mode, torch.no_grad, lambda: torch.autocast("cuda", dtype=torch.bfloat16))
    wanted = []
    for each in around:
        with each():
            wanted.append(draw(pipe, num_inference_steps=STEPS))
    handle = opened(pipe, 1)
    for _ in range(2):
        for each, one in zip(around, wanted, strict=True):
            with each():
                assert difference(draw(pipe, num_inference_steps=STEPS), one) <= (
                    TOLERANCE if each is not around[2] else 1e-2
                )
    assert done(handle)[0] >= 2
    handle.undo()


def test_a_stream_of_the_callers_is_followed() -> None:
    pipe = built("flux")
    one = draw(pipe, num_inference_steps=STEPS)
    handle = opened(pipe, 2)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = draw(pipe, num_inference_steps=STEPS)
        stream.synchronize()
        assert difference(got, one) <= TOLERANCE
    handle.undo()


# ---- the VAE ---------------------------------------------------------------------------------------------------------
def decoded(pipe: Any, z: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = pipe.vae.decode(z, return_dict=False)[0]
    return out


def test_the_vae_decodes_by_replays_whatever_changes() -> None:
    pipe = built("flux")
    z = torch.randn(2, pipe.vae.config.latent_channels, 8, 8, device=GPU, generator=torch.Generator(GPU).manual_seed(0))
    handle = parallelize(pipe)
    assert handle.decoding is not None
    for change in (lambda: None, pipe.vae.enable_tiling, pipe.vae.enable_slicing, lambda: pipe.vae.to(torch.bfloat16)):
        change()
        z = z.to(pipe.vae.dtype)
        with torch.no_grad():
            wanted = type(pipe.vae).decode(pipe.vae, z, return_dict=False)[0]
        before = handle.decoding.counts()
        for scale in (1.0, 1.0, 1.0, 0.5):
            with torch.no_grad():
                wanted = type(pipe.vae).decode(pipe.vae, z * scale, return_dict=False)[0]
            assert torch.allclose(decoded(pipe, z * scale), wanted, atol=1e-4 if z.dtype is torch.float32 else 0.05)
        after = handle.decoding.counts()
        assert (after.captures - before.captures, after.replays - before.replays) == (1, 3), handle.explain()
    handle.undo()
    assert "decode" not in vars(pipe.vae)


# ---- memory and failure ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", RANKS)
def test_undo_gives_the_memory_back(ranks: int) -> None:
    """All but cuBLAS's workspaces, one for each of the 32 streams that torch hands out in turn; and what the first round leaves behind is there
    before it is measured."""
    pipe = built("flux", torch.bfloat16)

    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(GPU)

    def round_trip() -> int:
        handle = opened(pipe, ranks)
        for width in (80, 256):
            pipe("an oak", height=256, width=width, num_inference_steps=3, max_sequence_length=31, output_type="pt")
        held = handle.counters[0].graphs.pool_bytes
        handle.undo()
        return held

    assert round_trip() > 0
    before = reserved()
    for _ in range(3):
        round_trip()
    assert reserved() <= before


def test_a_budget_too_small_is_named_and_pictures_are_drawn() -> None:
    pipe = built("flux")
    one = draw(pipe, num_inference_steps=STEPS)
    handle = opened(pipe, 2, graph_memory=1e-9)
    assert difference(draw(pipe, num_inference_steps=STEPS), one) <= TOLERANCE
    assert done(handle)[1] == 0 and "graph_memory" in handle.explain()
    handle.undo()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forward_that_waits_for_the_gpu_is_not_recorded_and_is_named(ranks: int) -> None:
    pipe = built("flux")
    one = draw(pipe, num_inference_steps=STEPS)

    def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.sum().item()

    hook = pipe.transformer.norm_out.register_forward_hook(look)
    handle = opened(pipe, ranks)
    for _ in range(2):
        assert difference(draw(pipe, num_inference_steps=STEPS), one) <= TOLERANCE
    assert done(handle) == (0, 0, 0) and "captur" in handle.explain()
    hook.remove()
    assert difference(draw(pipe, num_inference_steps=STEPS), one) <= TOLERANCE
    assert done(handle) == (1, STEPS - 1, 0), handle.explain()
    handle.undo()


def test_an_abort_between_replays_is_named_and_the_next_call_works() -> None:
    pipe = built("flux")
    one = draw(pipe, num_inference_steps=STEPS)
    handle = opened(pipe, 2)
    draw(pipe, num_inference_steps=STEPS)
    session: Any = handle.sessions[0]
    session.carriers[1].abort("it felt like it")
    with pytest.raises(PurlinError, match="felt like it"):
        draw(pipe, num_inference_steps=STEPS)
    assert difference(draw(pipe, num_inference_steps=STEPS), one) <= TOLERANCE
    captures, _, evictions = done(handle)
    assert (captures, evictions) == (2, 1)
    handle.undo()


def test_ranks_that_bring_a_communicator_each_of_one_world_stay_eager_and_say_why() -> None:
    pipes = [built("flux") for _ in range(2)]
    one = draw(pipes[0])

    def rank_of(comm: Communicator) -> tuple[Tensor, str]:
        handle = parallelize(pipes[comm.rank], communicator=comm)
        try:
            return draw(pipes[comm.rank]), handle.graphs_off
        finally:
            handle.undo()

    with LocalWorld(2, device=GPU, timeout=60) as world:
        for latents, why in world.run(rank_of):
            assert difference(latents, one) <= TOLERANCE and "recorded together only" in why
    with pytest.raises(ConfigError, match="GPU"):
        parallelize(built("flux", device="cpu"), ParallelConfig(graph=True))


# ---- a GPU a rank ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["gather_kv", "ulysses", "auto"])
@pytest.mark.parametrize("family", RECORDED)
@pytest.mark.usefixtures("two_gpus")
def test_threads_with_a_gpu_each_record_each(family: str, mode: str) -> None:
    pipe = built(family)
    one = draw(pipe, num_inference_steps=STEPS)
    handle = parallelize(pipe, ParallelConfig(attention=mode, graph=True, timeout=60), devices=2)
    for _ in range(2):
        assert difference(draw(pipe, num_inference_steps=STEPS), one) <= TOLERANCE, handle.explain()
    assert done(handle) == (1, 2 * STEPS - 1, 0), handle.explain()
    assert all(each.graphs.pool_bytes > 0 for each in handle.counters)
    with torch.no_grad():
        pipe.transformer.proj_out.weight.mul_(-0.5)
    changed = draw(pipe, num_inference_steps=STEPS)
    handle.undo()
    assert difference(changed, draw(pipe, num_inference_steps=STEPS)) <= TOLERANCE


def in_a_process(family: str, wanted: str, backend: str) -> tuple[float, tuple[int, int, int], str]:
    torch.backends.cudnn.allow_tf32 = False
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    pipe = built(family, device=f"cuda:{rank}")
    one = torch.load(wanted, map_location=f"cuda:{rank}")
    handle = parallelize(pipe, ParallelConfig(backend=backend, graph=True, timeout=60))
    worst = max(difference(draw(pipe, num_inference_steps=STEPS), one) for _ in range(2))
    counts, text = done(handle), handle.explain()
    handle.undo()
    return worst, counts, text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["purlin", "torch"])
@pytest.mark.parametrize("family", ["flux", "sd3"])
@pytest.mark.usefixtures("two_gpus")
def test_processes_with_a_gpu_each_record_alike(family: str, backend: str, tmp_path: Path) -> None:
    file = tmp_path / "one.pt"
    torch.save(draw(built(family), num_inference_steps=STEPS), file)
    for worst, counts, text in launch(in_a_process, 2, family, str(file), backend):
        assert worst <= TOLERANCE and counts == (1, 2 * STEPS - 1, 0), text
