"""The harness on a GPU: every figure is there, replays cost the host less, and every mode is as near to float32 as one rank is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from purlin_diffusion.pipelines import defaults, load

from purlin_diffusion.commands.picture import call
from purlin_diffusion.commands.timing import handmade
from purlin_diffusion.commands.timing.rows import Result, Row
from tests.latency.runs import read, timed

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
BRIEF = ("--steps", "4", "--height", "256", "--width", "256", "--dtype", "bfloat16", "--repeats", "1")


def run(family: str, *arguments: str) -> Result:
    return timed(*read("--device", "cuda", "--model", f"tiny:{family}", *BRIEF, *arguments))


def row(result: Result, name: str, how: str) -> Row:
    (found,) = (each for each in result.rows if (each.mode.name, each.mode.how) == (name, how))
    assert found.whole_s and not found.note, found.cannot or found.note
    return found


def check(found: Row) -> None:
    assert found.true is True, (found.mode.title, found.error, found.over_one)
    assert found.host is not None and found.host.ms > 0
    assert found.profile is not None and found.profile.syncs is not None
    assert found.memory_gb and found.decode_s and found.picture


@pytest.mark.parametrize("family", ["flux", "sd3"])
@pytest.mark.timeout(600)
def test_one_rank_eager_and_under_each_kind_of_graph(family: str) -> None:
    result = run(family)
    eager, graph, compiled, both = (
        row(result, "1 rank", how) for how in ("eager", "graph", "compile", "compile+graph")
    )
    for each in (eager, graph, compiled, both):
        check(each)
    for each in (graph, both):
        assert each.graphs is not None and each.graphs.captures == 1 and each.graphs.replays > 4 and not each.graphs.off
        assert each.host.ms < eager.host.ms and each.host.allocations < eager.host.allocations  # type: ignore[union-attr]
        assert each.host.mallocs == 0 and each.profile.syncs == 0  # type: ignore[union-attr]
    assert "see 1 rank" in next(each.cannot for each in result.rows if each.mode.name == "ours")


def test_the_clock_waits_for_the_gpu_before_and_after_a_picture_and_between_steps_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, waits = load("tiny:flux", device=GPU), []
    wait = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: (waits.append(device), wait(device)))
    arguments = {**defaults("tiny:flux"), "prompt": "a roof", "num_inference_steps": 4}
    _, seconds = call(pipe, arguments, seed=0)
    assert len(waits) == 2
    assert len(seconds.steps) == 3 and min(*seconds.steps, seconds.decode) > 0
    assert sum(seconds.steps) + seconds.decode < seconds.whole


@pytest.mark.parametrize("attention", ["gather_kv", "ulysses"])
@pytest.mark.timeout(600)
def test_two_ranks_that_share_a_gpu(attention: str) -> None:
    result = run("flux", "--threads", "--ranks", "2", "--attention", attention, "--modes", "ours", "torch")
    for how in ("eager", "graph", "compile", "compile+graph"):
        found = row(result, "ours", how)
        check(found)
        assert found.profile and found.profile.exchange_ms and found.profile.lanes["exchange"]
        assert (found.graphs is not None and found.graphs.replays > 4) == ("graph" in how)
    assert all(each.cannot for each in result.rows if each.mode.name == "ours over torch")


def test_a_graph_by_hand_replays_what_the_model_would_do() -> None:
    model = load("tiny:flux", device=GPU).transformer
    drawn = torch.Generator(GPU).manual_seed(0)

    def call(time: float) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(1, 6, 64, device=GPU, generator=drawn),
            "encoder_hidden_states": torch.randn(1, 5, 32, device=GPU, generator=drawn),
            "pooled_projections": torch.randn(1, 32, device=GPU, generator=drawn),
            "timestep": torch.full((1,), time, device=GPU),
            "guidance": torch.full((1,), 3.5, device=GPU),
            "img_ids": torch.zeros(6, 3, device=GPU),
            "txt_ids": torch.zeros(5, 3, device=GPU),
            "return_dict": False,
        }

    calls = [call(time) for time in (1.0, 0.5, 0.25, 0.125)]
    with torch.no_grad():
        wanted = [model(**each)[0] for each in calls]
        with handmade.graphed(model) as made:
            got = [model(**each)[0] for each in calls]
            assert (made.captures, made.replays) == (1, 3)
    for mine, one in zip(got, wanted, strict=True):
        assert torch.allclose(mine, one, atol=1e-5)
    assert not torch.allclose(wanted[0], wanted[1], atol=1e-2)
    assert "forward" not in vars(model)
