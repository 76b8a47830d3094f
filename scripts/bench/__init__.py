"""What scripts/bench_collectives.py, scripts/tune.py and scripts/benchmarks.py are made of.

host.py         ours beside gloo, on CPU processes
cases.py        what is exchanged on GPUs, and what must come of it
worlds.py       where ranks live: threads of one process, or processes of torchrun
rivals.py       who exchanges it: purlin, NCCL, torch's symmetric memory, and plain copies as the yardstick
clock.py        how a turn is timed: graph replays, and eager calls
measure.py      a case, all its rivals in turn, right before and after
gpu.py          the sweep of bench_collectives.py --device cuda
record.py       the lines on record, and what machine they are from; needs no torch
"""
