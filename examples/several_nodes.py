"""Several machines: prompts are split over the nodes, and each picture is drawn by the ranks of one node. On each of two nodes:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST --master-port 29500 examples/several_nodes.py \\
        --prompts "digit three" "digit four" "digit five"

(with --node-rank 1 on the other). purlin exchanges within a node; between nodes there is torch.distributed, here for the start and the end only.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import purlin_core
from purlin_diffusion import parallelize, pipelines


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of several prompts on several nodes.")
    parser.add_argument("--model", default="digits", help="a name, folder or hub id that pipelines.load knows")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--steps", type=int, help="denoising steps of a picture")
    parser.add_argument("--out", type=Path, default=Path("out/nodes"), help="a folder on each node")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])  # of this node; the same on every node
    nodes = dist.get_world_size() // ranks
    mesh = init_device_mesh(device.type, (nodes, ranks), mesh_dim_names=("node", "rank"))
    node = mesh["node"].get_local_rank()

    pipe = pipelines.load(args.model, device=device)
    pipe.set_progress_bar_config(disable=True)
    arguments = pipelines.defaults(args.model) | ({} if args.steps is None else {"num_inference_steps": args.steps})
    args.out.mkdir(parents=True, exist_ok=True)
    with purlin_core.Communicator(mesh["rank"], device) as communicator:
        handle = parallelize(pipe, communicator=communicator)
        for number in range(node, len(args.prompts), nodes):
            generator = torch.Generator().manual_seed(number)
            image = pipe(args.prompts[number], generator=generator, **arguments).images[0]
            if handle.is_root:
                image.save(args.out / f"{number}.png")
                print(
                    f"node {node} of {nodes}: {args.prompts[number]!r} on {handle.ranks} ranks, {handle.route}",
                    flush=True,
                )
        handle.undo()
    dist.barrier()  # nobody leaves while another still needs the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
