"""Under a profiler a root call, each of its attentions and each of their exchanges is a range with a name; without one nothing is made."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from purlin_diffusion import ParallelConfig, parallelize

ATTENTIONS = {
    "flux": {"transformer_blocks.*.attn": 2, "single_transformer_blocks.*.attn": 2},
    "sd3": {"transformer_blocks.*.attn": 3, "transformer_blocks.*.attn2?": 2},
    "qwenimage": {"transformer_blocks.*.attn": 3},
}


def ranges(prof: profile) -> Counter[str]:
    return Counter(event.name for event in prof.events() or () if event.name.startswith("purlin "))


@pytest.mark.parametrize(("attention", "exchanges"), [("gather_kv", 1), ("ulysses", 2)])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_root_calls_attentions_and_exchanges_are_ranges(name: str, attention: str, exchanges: int, tiny: Any) -> None:
    case = tiny(name)
    handle = parallelize(case.model, ParallelConfig(attention=attention), devices=2)
    case.run()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        case.run()
    handle.undo()
    found = ranges(prof)
    assert found[f"purlin root call of {type(case.model).__name__}"] >= 1
    at = {text.removeprefix("purlin attention at "): n for text, n in found.items() if "attention at" in text}
    assert at.keys() == ATTENTIONS[name].keys()
    for path, count in ATTENTIONS[name].items():
        assert at[path] % count == 0 and at[path] >= count
    calls = {text: n for text, n in found.items() if text.startswith("purlin exchange ")}
    assert all("->" in text for text in calls)
    assert sum(calls.values()) >= exchanges * sum(ATTENTIONS[name].values())


def test_nothing_is_made_while_no_profiler_runs(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny("flux")
    handle = parallelize(case.model, devices=2)
    monkeypatch.setattr(profiler, "record_function", lambda *_: pytest.fail("a range was made"))
    case.run()
    handle.undo()
