"""The launchers that users have, run as they run them: each rank finds its place, and the picture is that of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.diffusion.launchers import accelerate_launch, run, torchrun, torchrun_nodes

TOLERANCE = 1e-5

DRAW = """
import json, os, sys
import numpy as np
import conftest
from purlin_diffusion import ParallelConfig, parallelize

if "state" in sys.argv:  # as scripts written for accelerate begin
    from accelerate import PartialState
    PartialState(cpu=True)
case = conftest.flux()
handle = parallelize(case.model, ParallelConfig(timeout=60))
np.save(f"out{handle.rank}.npy", case.run().numpy())
with open(f"said{handle.rank}.json", "w") as file:
    json.dump([handle.rank, handle.ranks, handle.route, int(os.environ["RANK"])], file)
handle.undo()
"""

NODES = """
import json, os
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import conftest
from purlin_core import Communicator
from purlin_diffusion import ConfigError, ParallelConfig, parallelize

dist.init_process_group("gloo")
rank, said = dist.get_rank(), {}
case = conftest.flux()
for backend in ("auto", "purlin"):
    try:
        parallelize(case.model, ParallelConfig(backend=backend))
    except ConfigError as error:
        said[backend] = str(error)
handle = parallelize(case.model, ParallelConfig(backend="torch", timeout=60))
said["torch"] = handle.route
np.save(f"all{rank}.npy", case.run().numpy())
handle.undo()

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
node = mesh["node"].get_local_rank()
with Communicator(mesh["rank"]) as communicator:
    handle = parallelize(case.model, communicator=communicator)
    said["node"], said["rank"], said["ranks"] = node, handle.rank, handle.ranks
    np.save(f"own{rank}.npy", case.run(timestep=torch.full((2,), 0.5 + node / 4)).numpy())
    handle.undo()
with open(f"said{rank}.json", "w") as file:
    json.dump(said, file)
dist.barrier()
dist.destroy_process_group()
"""


def program(folder: Path, text: str) -> str:
    file = folder / "program.py"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("launcher", "state"), [(torchrun, False), (accelerate_launch, True)], ids=["torchrun", "accelerate"]
)
def test_launched_processes_draw_what_one_rank_draws(
    launcher: Callable[..., list[str]], state: bool, tiny: Any, tmp_path: Path
) -> None:
    run(launcher(2, program(tmp_path, DRAW), *["state"] * state), folder=tmp_path)
    alone = tiny("flux").run().numpy()
    for rank in range(2):
        assert json.loads((tmp_path / f"said{rank}.json").read_text()) == [rank, 2, "purlin: 2 processes on cpu", rank]
        assert abs(np.load(tmp_path / f"out{rank}.npy") - alone).max() <= TOLERANCE


def test_nodes_share_no_picture_unless_asked_and_each_draws_its_own(tiny: Any, tmp_path: Path) -> None:
    """Two nodes of two ranks: one picture over all is refused by name, on every rank alike; torch carries it where it is asked for; and a
    communicator of each node's ranks draws another picture on each."""
    run(*torchrun_nodes(2, 2, program(tmp_path, NODES)), folder=tmp_path)
    case = tiny("flux")
    everywhere = case.run().numpy()
    for rank in range(4):
        said = json.loads((tmp_path / f"said{rank}.json").read_text())
        for backend in ("auto", "purlin"):
            assert "one node; got " in said[backend] and "communicator=purlin_core.Communicator" in said[backend]
            assert "(node 0): rank 0, 1;" in said[backend] and "(node 1): rank 2, 3." in said[backend]
        assert said["torch"] == "torch: asked for; gloo between 4 processes on cpu"
        assert (said["node"], said["rank"], said["ranks"]) == (rank // 2, rank % 2, 2)
        assert abs(np.load(tmp_path / f"all{rank}.npy") - everywhere).max() <= TOLERANCE
        alone = case.run(timestep=torch.full((2,), 0.5 + (rank // 2) / 4)).numpy()
        assert abs(np.load(tmp_path / f"own{rank}.npy") - alone).max() <= TOLERANCE
    assert abs(np.load(tmp_path / "own0.npy") - np.load(tmp_path / "own2.npy")).max() > 100 * TOLERANCE
