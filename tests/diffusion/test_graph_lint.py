"""The lint finds, on the CPU, what a CUDA graph forbids, with its place; and finds nothing in the models that are recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from purlin_diffusion import parallelize, pipelines
from purlin_diffusion.__main__ import main
from purlin_diffusion.commands.lint import examine, table
from purlin_diffusion.graph.lint import lint
from tests.diffusion.conftest import flux, sd3


class Inner(nn.Module):
    def __init__(self, body: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


class Outer(nn.Module):
    def __init__(self, body: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), Inner(body)])

    def forward(self, x: Tensor) -> Any:
        return self.blocks[1](self.blocks[0](x))


def store(x: Tensor) -> None:
    x[x > 0] = 1.0


FORBIDDEN: list[tuple[str, str, Callable[[Tensor], Any]]] = [
    ("host sync", "_local_scalar_dense", lambda x: x.sum().item()),
    ("host sync", "_local_scalar_dense", lambda x: 1 if x.sum() > 0 else 2),
    ("host sync", "_local_scalar_dense", lambda x: int(x.sum())),
    ("host sync", "nonzero", lambda x: x.nonzero()),
    ("host sync", "nonzero", lambda x: torch.where(x > 0)),
    ("host sync", "index with a mask", lambda x: x[x > 0]),
    ("host sync", "with a mask", store),
    ("host sync", "masked_select", lambda x: x.masked_select(x > 0)),
    ("host sync", "unique", lambda x: torch.unique(x)),
    (
        "host sync",
        "repeat_interleave",
        lambda x: x.repeat_interleave(torch.ones(2, dtype=torch.long, device=x.device), 0),
    ),
    ("host sync", "equal", lambda x: torch.equal(x, x)),
    ("host sync", ".cpu()", lambda x: x.cpu()),
    ("host sync", ".numpy()", lambda x: x.numpy()),
    ("host sync", ".tolist()", lambda x: x.tolist()),
    ("host sync", '.to("cpu")', lambda x: x.to("cpu")),
    ("host copy", "torch.tensor", lambda x: x * torch.tensor([1.0, 2.0, 3.0], device=x.device)),
    ("host copy", "torch.arange without device=", lambda x: x * torch.arange(3).to(x.device)),
    ("host copy", "torch.zeros without device=", lambda x: x * torch.zeros(3).to(x)),
]


@pytest.mark.parametrize(("kind", "what", "body"), FORBIDDEN)
def test_what_forbids_a_graph_is_found_with_its_place(kind: str, what: str, body: Callable[[Tensor], Any]) -> None:
    model, x = Outer(body), torch.ones(2, 3)
    found = lint(model, lambda: model(x))
    (finding,) = found
    assert finding.kind == kind and what in finding.what
    assert finding.module == "Outer.blocks.1" and Path(finding.file) == Path(__file__) and found[finding] == 1
    assert f"{Path(__file__).name}:{body.__code__.co_firstlineno + (body is store)}" in finding.place


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.to(x.device, torch.float64),
        lambda x: x * torch.arange(3, device=x.device),
        lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
        lambda x: x[:, [0, 2]] if x.shape[0] > 1 else x,
        lambda x: x.new_zeros(3) + torch.full((3,), 2.0, device=x.device),
        lambda x: x.softmax(-1).masked_fill(x > 0, 0.0),
    ],
)
def test_what_a_graph_allows_is_not(body: Callable[[Tensor], Any]) -> None:
    model, x = Outer(body), torch.ones(2, 3)
    assert not lint(model, lambda: model(x))


def test_an_exception_leaves_nothing_behind() -> None:
    model = Outer(lambda x: x @ x)
    with pytest.raises(RuntimeError):
        lint(model, lambda: model(torch.ones(2, 3)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.arange(2).tolist() == [0, 1]


SAY_NONE = {"tiny:qwenimage"}


@pytest.mark.parametrize("name", sorted({name for name in pipelines.names() if name.startswith("tiny:")} - SAY_NONE))
def test_a_plan_that_says_root_has_a_forward_without_findings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", name]) == 0
    out = capsys.readouterr().out
    assert out.count("nothing that forbids a graph") == 2 and "graph: root" in out


@pytest.mark.parametrize("case", [flux, sd3])
def test_what_ranks_add_forbids_no_graph_either(case: Callable[[], Any]) -> None:
    tiny = case()
    handle = parallelize(tiny.model, devices=2)
    tiny.run()
    assert not lint(tiny.model, tiny.run)
    handle.undo()


def test_what_is_found_makes_a_table_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = pipelines.load("tiny:flux")

    def peek(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.mean().item()

    pipe.transformer.norm_out.register_forward_hook(peek)
    monkeypatch.setattr(pipelines, "load", lambda name: pipe)
    assert main(["lint", "tiny:flux"]) == 1  # the pipeline's own cache_context leaves a registry
    capsys.readouterr()
    before = {part: {key: id(value) for key, value in vars(part).items()} for part in (pipe.transformer, pipe.vae)}
    assert main(["lint", "tiny:flux"]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("host sync")]
    assert len(rows) == 1 and "_local_scalar_dense" in rows[0] and "output.mean().item()" in rows[0]
    for part, held in before.items():
        assert {key: id(value) for key, value in vars(part).items()} == held


def test_a_model_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "spruce"]) == 2
    assert "MODEL needs one of digits" in capsys.readouterr().err


def test_only_the_last_call_counts() -> None:
    """What a first call makes and keeps is there when the second is recorded."""
    pipe = pipelines.load("tiny:flux")
    kept: list[Tensor] = []

    def once(*_: Any) -> None:
        if not kept:
            kept.append(torch.tensor([1.0]))

    pipe.transformer.norm_out.register_forward_hook(once)
    found = examine(pipe, {**pipelines.defaults("tiny:flux"), "prompt": "an oak", "num_inference_steps": 2})
    assert kept and not any(found.values()) and "nothing" in table(found)
