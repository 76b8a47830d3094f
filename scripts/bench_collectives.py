"""Our collectives beside others' in one run: the rivals take turns in every round, so that all see the same machine.

On the CPU, beside gloo (scripts/bench/host.py):
    python scripts/bench_collectives.py --ranks 2 [--op NAME ...] [--bytes N ...] [--rounds N] [--json FILE]
On one GPU, ranks as threads, beside plain copies; on several, beside NCCL and torch's symmetric memory (scripts/bench/gpu.py):
    python scripts/bench_collectives.py --device cuda --ranks 2 [--quick] [--record FILE]
    torchrun --nproc-per-node 2 scripts/bench_collectives.py --device cuda [--quick] [--record FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

# Before torch is imported. Multicast stays off: it can put a host's GPUs out of service.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given, others = parser.parse_known_args(arguments)
    if given.device == "cuda":
        from bench import gpu

        return gpu.main(others)
    from bench import host

    return host.main(others)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
