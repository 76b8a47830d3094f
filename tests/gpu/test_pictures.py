"""Pictures on a GPU: several ranks draw what one draws, sharing it or with one each; errors are named, and the next call works."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from purlin_diffusion.pipelines import flux, qwenimage, sd3
from torch import Tensor

from purlin_core import Communicator, LocalWorld
from purlin_core.errors import PurlinError
from purlin_diffusion import ConfigError, InputsDifferError, ParallelConfig, RankError, parallelize
from purlin_diffusion.__main__ import main

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
TOLERANCE = 1e-5  # of the largest value, f32: a Linear on fewer rows may run another kernel
FAMILIES = {
    "flux": flux.tiny,
    "sd3": sd3.tiny,
    "sd3.5": lambda **how: sd3.tiny(qk_norm="rms_norm", dual_layers=(0,), **how),
    "qwenimage": qwenimage.tiny,
}
MODES = ("gather_kv", "ulysses")
TINY = ("--model", "tiny:flux", "--steps", "2", "--height", "48", "--width", "80", "--device", "cuda")


@pytest.fixture(autouse=True)
def _exact_convolutions() -> Iterator[None]:
    """cuDNN's default rounds their f32 inputs to 10 bits, which makes a step of a difference of 1e-7."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


def built(family: str, dtype: torch.dtype = torch.float32, device: str = GPU) -> Any:
    pipe = FAMILIES[family](dtype=dtype, device=device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any, *, seed: int = 0, **changes: Any) -> Tensor:
    """Latents after two steps, from 15 image tokens: no count of ranks here divides them."""
    call = {"height": 48, "width": 80, "num_inference_steps": 2, "guidance_scale": 3.5, "max_sequence_length": 31}
    generator = torch.Generator().manual_seed(seed)
    latents: Tensor = pipe("an oak", generator=generator, **{"output_type": "latent", **call, **changes}).images
    return latents


def difference(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).abs().max() / y.double().abs().max())


def sharing(ranks: int) -> list[str]:
    return [GPU] * ranks


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


# ---- ranks that share a GPU ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_on_one_gpu_draw_what_one_draws(family: str, mode: str, ranks: int) -> None:
    pipe = built(family)
    one = draw(pipe)
    handle = parallelize(pipe, ParallelConfig(attention=mode, backend="purlin", timeout=60), devices=sharing(ranks))
    assert handle.route.startswith("purlin") and "share" in handle.route
    assert difference(draw(pipe), one) <= TOLERANCE
    assert difference(draw(pipe, num_images_per_prompt=2)[:1], draw(pipe, seed=1)) > 0.1  # the negative control
    assert all(stats.calls > 0 and stats.sent_bytes > 0 for stats in handle.stats)
    assert sum(counters.tokens["image"] for counters in handle.counters) % 15 == 0
    handle.undo()
    assert torch.equal(draw(pipe), one)


@pytest.mark.parametrize("family", ["sd3", "sd3.5"])
def test_halves_of_guidance_on_one_gpu_are_what_one_draws(family: str) -> None:
    """By the batch where it is even, and by tokens in the calls that skip-layer guidance adds."""
    pipe = built(family)
    skipping = {"num_inference_steps": 4, "skip_guidance_layers": [0], "skip_layer_guidance_stop": 0.9}
    calls: list[dict[str, Any]] = [{}, {"num_images_per_prompt": 2}, skipping]
    ones = [draw(pipe, **call) for call in calls]
    handle = parallelize(pipe, ParallelConfig(cfg=2, backend="purlin", timeout=60), devices=sharing(2))
    counts = []
    for call, one in zip(calls, ones, strict=True):
        assert difference(draw(pipe, **call), one) <= TOLERANCE
        counts.append({(each.calls, each.halved) for each in handle.counters})
    assert counts == [{(2, 2)}, {(4, 4)}, {(11, 8)}]
    handle.undo()
    assert torch.equal(draw(pipe), ones[0])


@pytest.mark.parametrize("mode", [*MODES, "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_several_ranks_are_no_further_from_the_truth_than_one(family: str, mode: str) -> None:
    truth = draw(built(family)).double()
    pipe = built(family, torch.bfloat16)
    one = draw(pipe).double()
    handle = parallelize(pipe, ParallelConfig(attention=mode, backend="purlin", timeout=60), devices=sharing(2))
    two = draw(pipe).double()
    handle.undo()
    assert two.isfinite().all()
    assert (two - truth).norm() <= 2 * (one - truth).norm()


def test_a_stream_of_the_callers_is_followed() -> None:
    pipe = built("flux")
    one = draw(pipe)
    handle = parallelize(pipe, ParallelConfig(backend="purlin", timeout=60), devices=sharing(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        two = draw(pipe)
    stream.synchronize()
    assert difference(two, one) <= TOLERANCE
    handle.undo()


def test_a_changed_weight_is_every_ranks() -> None:
    pipe = built("flux")
    handle = parallelize(pipe, ParallelConfig(backend="purlin", timeout=60), devices=sharing(2))
    before = draw(pipe)
    with torch.no_grad():
        pipe.transformer.proj_out.weight.mul_(-0.5)
    after = draw(pipe)
    handle.undo()
    assert difference(after, before) > 0.1
    assert difference(after, draw(pipe)) <= TOLERANCE


# ---- what goes wrong -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_exception_of_a_rank_is_named_and_the_next_call_works(rank: int) -> None:
    pipe = built("flux")
    one = draw(pipe)
    handle = parallelize(pipe, ParallelConfig(backend="purlin", timeout=60), devices=sharing(3))
    session: Any = handle._sessions[0]
    model = pipe.transformer if rank == 0 else session._workers[rank - 1].sharded.model

    def fail(*_: Any) -> None:
        if (threading.current_thread() is threading.main_thread()) == (rank == 0):
            raise RuntimeError("out of glue")

    hook = model.single_transformer_blocks[0].attn.to_q.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of glue") as caught:
        draw(pipe)
    if rank:
        assert isinstance(caught.value, RankError) and caught.value.rank == rank
    hook.remove()
    assert difference(draw(pipe), one) <= TOLERANCE
    handle.undo()
    again = parallelize(pipe, ParallelConfig(backend="purlin", timeout=60), devices=sharing(2))
    assert difference(draw(pipe), one) <= TOLERANCE
    again.undo()


@pytest.mark.parametrize("graph", [False, "auto"])
@pytest.mark.parametrize("output", ["latent", "pt"])
@pytest.mark.parametrize("steps", [1, 3])
def test_what_an_exchange_met_in_the_last_step_is_heard_before_the_picture_leaves(
    steps: int, output: str, graph: Any
) -> None:
    """Else a wrong last step would leave as an image."""
    pipe = built("flux")
    one = draw(pipe)
    handle = parallelize(pipe, ParallelConfig(backend="purlin", graph=graph, timeout=60), devices=sharing(2))
    through: list[int] = []

    def leave(_: Any, i: int, t: Any, kept: Any) -> dict[str, Any]:
        through.append(i)
        if i == steps - 1:  # the last exchange lies behind it
            handle.sessions[0].carriers[0].abort("it felt like it")
        return {}

    with pytest.raises(PurlinError, match="felt like it"):
        draw(pipe, num_inference_steps=steps, output_type=output, callback_on_step_end=leave)
    assert len(through) == steps
    assert difference(draw(pipe), one) <= TOLERANCE
    handle.undo()


def lingering(pipe: Any) -> None:
    """Each step takes the GPU a fifth of a second or so more, and the host nothing."""
    pipe.transformer.proj_out.register_forward_hook(lambda *_: torch.cuda._sleep(200_000_000))


@pytest.mark.parametrize("graph", [False, "auto"])
def test_the_host_is_one_step_ahead_of_the_gpu_and_at_the_end_of_a_picture_none(graph: Any) -> None:
    pipe = built("flux")
    lingering(pipe)
    handle = parallelize(pipe, ParallelConfig(backend="purlin", graph=graph, timeout=60), devices=sharing(2))
    draw(pipe, num_inference_steps=5)
    ends: list[torch.cuda.Event] = []

    def look(_: Any, i: int, t: Any, kept: Any) -> dict[str, Any]:
        ends.append(torch.cuda.current_stream().record_event())
        assert not ends[i].query()  # of this step
        assert i < 2 or ends[i - 2].query()
        return {}

    draw(pipe, num_inference_steps=5, callback_on_step_end=look)
    assert len(ends) == 5 and ends[-2].query()
    handle.undo()


def test_a_call_of_the_model_alone_is_heard_before_it_returns() -> None:
    pipe = built("flux")
    lingering(pipe)
    handle = parallelize(pipe.transformer, ParallelConfig(backend="purlin", timeout=60), devices=sharing(2))
    ended: list[bool] = []
    step = pipe.scheduler.step

    def look(*args: Any, **kwargs: Any) -> Any:
        ended.append(torch.cuda.current_stream().query())
        return step(*args, **kwargs)

    pipe.scheduler.step = look
    draw(pipe, num_inference_steps=4)
    assert ended == [True] * 4
    handle.undo()


def test_torch_needs_a_gpu_a_rank() -> None:
    pipe = built("flux")
    with pytest.raises(ConfigError, match="needs a GPU a rank; got 2 ranks on cuda:0"):
        parallelize(pipe, ParallelConfig(backend="torch"), devices=sharing(2))
    if torch.cuda.device_count() > 1:
        with pytest.raises(ConfigError, match="all different or all the same"):
            parallelize(pipe, devices=[GPU, GPU, "cuda:1"])
    absent = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"GPUs that torch sees, {absent}; got"):
        parallelize(pipe, devices=[GPU, f"cuda:{absent}"])
    with pytest.raises(ConfigError, match=r"\['cuda:0'\] \* 16"):
        parallelize(pipe, devices=16)
    parallelize(pipe, devices=sharing(2)).undo()


# ---- ranks that hold their model each --------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
def test_a_communicator_of_the_callers_on_a_gpu(mode: str) -> None:
    pipes = [built("flux") for _ in range(2)]
    one = draw(pipes[0])

    def rank_of(comm: Communicator) -> Tensor:
        handle = parallelize(pipes[comm.rank], ParallelConfig(attention=mode), communicator=comm)
        try:
            return draw(pipes[comm.rank])
        finally:
            handle.undo()

    with LocalWorld(2, device=GPU, timeout=60) as world:
        for latents in world.run(rank_of):
            assert difference(latents, one) <= TOLERANCE


def test_inputs_that_differ_are_named_on_all_and_the_next_call_works() -> None:
    pipes = [built("flux") for _ in range(2)]
    one = draw(pipes[0])

    def rank_of(comm: Communicator) -> Tensor:
        handle = parallelize(pipes[comm.rank], communicator=comm)
        with pytest.raises(InputsDifferError, match="hidden_states"):
            draw(pipes[comm.rank], width=(80, 96)[comm.rank])
        latents = draw(pipes[comm.rank])
        handle.undo()
        return latents

    with LocalWorld(2, device=GPU, timeout=60) as world:
        for latents in world.run(rank_of):
            assert difference(latents, one) <= TOLERANCE


# ---- the commands ----------------------------------------------------------------------------------------------------
def test_generate_draws_the_same_digit_on_one_rank_and_on_ranks_that_share_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = torch.cuda.device_count() + 1
    for ranks in (1, several):
        out = str(tmp_path / f"{ranks}.png")
        assert (
            main(["generate", "--model", "digits", "--prompt", "digit three", "--ranks", str(ranks), "--out", out]) == 0
        )
    assert f"{several} ranks share cuda:0: this shows that it works, not how fast" in capsys.readouterr().out
    one, shared = pixels(tmp_path / "1.png"), pixels(tmp_path / f"{several}.png")
    assert np.ptp(one) > 100
    assert abs(one - shared).max() <= 1
    written = json.loads((tmp_path / f"{several}.json").read_text())
    assert (written["device"], written["mode"]) == ("cuda", "threads") and written["route"].startswith("purlin")
    assert min(written["sent_bytes"]) > 0


def test_latency_has_a_row_for_purlin_and_says_why_not_for_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several, record = torch.cuda.device_count() + 1, tmp_path / "latency.json"
    assert (
        main(["latency", *TINY, "--ranks", str(several), "--repeats", "1", "--how", "eager", "--json", str(record)])
        == 0
    )
    assert "not how fast" in capsys.readouterr().out
    rows = {row["mode"]: row for row in json.loads(record.read_text())["rows"] if row["how"] == "eager"}
    assert rows["ours"]["whole_s"]["median"] > 0 and rows["ours"]["difference"] <= TOLERANCE
    assert "needs a GPU a rank" in rows["ours over torch"]["cannot"] and rows["ours over torch"]["whole_s"] is None
    others = {"accelerate device_map"} if torch.cuda.device_count() > 1 else set()
    assert {name for name, row in rows.items() if not row["cannot"]} == {"1 rank", "ours"} | others


# ---- a GPU a rank ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["purlin", "torch"])
@pytest.mark.parametrize("mode", [*MODES, "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_gpus_of_one_process_draw_what_one_draws(two_gpus: None, family: str, mode: str, backend: Any) -> None:
    pipe = built(family)
    one = draw(pipe)
    handle = parallelize(pipe, ParallelConfig(attention=mode, backend=backend, timeout=60), devices=2)
    assert handle.route.startswith(backend)
    assert difference(draw(pipe), one) <= TOLERANCE
    with torch.no_grad():
        pipe.transformer.proj_out.weight.mul_(-0.5)
    changed = draw(pipe)
    handle.undo()
    assert difference(changed, draw(pipe)) <= TOLERANCE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["purlin", "torch"])
def test_two_processes_with_a_gpu_each_draw_what_one_draws(two_gpus: None, backend: str, tmp_path: Path) -> None:
    for ranks in (1, 2):
        out = str(tmp_path / f"{ranks}.png")
        assert main(["generate", *TINY, "--ranks", str(ranks), "--backend", backend, "--out", out]) == 0
    assert abs(pixels(tmp_path / "1.png") - pixels(tmp_path / "2.png")).max() <= 1
    written = json.loads((tmp_path / "2.json").read_text())
    assert (written["device"], written["mode"]) == ("cuda", "processes") and written["route"].startswith(backend)
