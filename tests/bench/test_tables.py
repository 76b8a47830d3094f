"""The table that tune.py writes chooses what was fastest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import tune
from bench import gpu
from bench.worlds import Force

from purlin_core.moves import Kind
from purlin_core.tune import CUDA_PACKET_BYTES, Regime, choose, cuda_scratch, read_table


@pytest.mark.parametrize("ranks", [2, 6, 8, 16])
def test_only_what_can_run_is_tried(ranks: int) -> None:
    for largest in (1, 512, 1 << 14, 1 << 18, 1 << 19, 1 << 26):
        tried = tune.candidates(largest, ranks)
        assert len(set(tried)) == len(tried) > 0
        for force in tried:
            tuning = force.tuning("NVIDIA Test", cuda_scratch(ranks).slots)
            schedule = choose(
                tuning,
                Kind.COPY,
                cuda_scratch(ranks),
                largest=largest,
                granted=force.granted,
                name="all_gather",
                ranks=ranks,
            )
            assert (schedule.regime, schedule.teams) == (force.regime, force.teams)
        window = min(CUDA_PACKET_BYTES, cuda_scratch(ranks).teams * cuda_scratch(ranks).window_bytes)
        assert any(force.regime is Regime.PACKET for force in tried) == (largest <= window)


def test_the_fewest_teams_of_a_tie_win() -> None:
    times = {Force(Regime.STAGED, 32): 10.0, Force(Regime.STAGED, 16): 10.1, Force(Regime.PACKET, 4): 10.3}
    assert tune.winner(times) == Force(Regime.STAGED, 16)


def test_a_written_table_chooses_what_was_fastest_at_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "versions", lambda: {"torch": "2.11"})
    path, name = tmp_path / "deep" / "nvidia-test.json", "NVIDIA Test"
    best = [
        (1024, Force(Regime.PACKET, 1)),
        (4096, Force(Regime.PACKET, 1)),
        (16384, Force(Regime.PACKET, 8)),
        (1 << 20, Force(Regime.STAGED, 32)),
    ]
    for ranks in (2, 4):
        tune.write(path, name, tune.merged("all_gather", ranks, False, best), "abc")
    tuning = read_table(path, gpu=name)
    assert len(tuning.rows) == 6
    assert json.loads(path.read_text())["commit"] == "abc"
    for ranks in (2, 4):
        for size, force in [
            *best,
            (1 << 28, best[-1][1]),
            (1, best[0][1]),
            (5000, best[0][1]),
            (8193, best[2][1]),
        ]:
            schedule = choose(
                tuning, Kind.COPY, cuda_scratch(ranks), largest=size, granted=False, name="all_gather", ranks=ranks
            )
            assert (schedule.regime, schedule.teams) == (force.regime, force.teams)
            assert "row all_gather" in schedule.why


def test_without_a_gpu_the_scripts_say_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for program in (gpu.main, tune.main):
        with pytest.raises(SystemExit, match="needs a GPU"):
            program([])
