"""Recordings as CUDA graphs, through torch.cuda.CUDAGraph. The only file here that calls CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class CudaPool:
    """A graph pool of torch's allocator on `device`, and the stream on which all its graphs are captured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.handle = torch.cuda.graph_pool_handle()
        self._ended = torch.cuda.Event()  # type: ignore[no-untyped-call]  # the latest turn; one that was never recorded holds nobody back

    def recorder(self) -> CudaRecorder:
        return CudaRecorder(self)

    def prepare(self, stream: torch.cuda.Stream | None) -> None:
        """cuBLAS keeps a workspace a thread and stream: made during a capture it would lie in the graph's pool, and keep it for ever."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream if stream is None else stream):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.zeros(16, 16, device=self.device, dtype=dtype)
                torch.mm(x, x)
                torch.addmm(x[0], x, x)
            torch.cuda.current_stream(self.device).synchronize()

    def branch(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @contextmanager
    def turn(self) -> Iterator[None]:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._ended)
        try:
            yield
        finally:
            self._ended.record(stream)

    def settle(self) -> None:
        """Wait for the latest turn: hosts run ahead, and what a replay uses must not go."""
        with suppress(RuntimeError):  # the CUDA context is broken, by whatever: nothing runs in it any more
            self._ended.synchronize()

    @property
    def used_bytes(self) -> int:
        here = tuple(self.handle), self.device.index
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(each["total_size"] for each in segments if (tuple(each["segment_pool_id"]), each["device"]) == here)

    @property
    def free_bytes(self) -> int:
        """What the GPU has left, and what torch has in store."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def release(self) -> None:
        """A pool that has lost its last graph cannot be used again: torch asserts that."""
        self.handle = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()


class CudaRecorder:
    """One CUDA graph."""

    def __init__(self, pool: CudaPool) -> None:
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def record(self, body: Callable[[], T], *, ready: Callable[[], None]) -> T:
        """Other threads may use CUDA meanwhile. What belongs to the capture may come from other threads too, on streams that branch off."""
        pool, graph = self._pool, torch.cuda.CUDAGraph()
        with torch.cuda.device(pool.device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # during a capture torch cannot give back what it has in store
            caller = torch.cuda.current_stream()
            pool.stream.wait_stream(caller)
            ready()
            with torch.cuda.stream(pool.stream):
                result = _captured(graph, pool.handle, body)
            caller.wait_stream(pool.stream)
        self._graph = graph
        return result

    def replay(self) -> None:
        assert self._graph is not None, "record() came first"
        self._graph.replay()

    def free(self) -> None:
        if self._graph is not None:
            self._pool.settle()
            self._graph.reset()
            self._graph = None


def _captured(graph: torch.cuda.CUDAGraph, handle: Any, body: Callable[[], T]) -> T:
    graph.capture_begin(pool=handle, capture_error_mode="thread_local")
    try:
        result = body()
    except BaseException:
        with suppress(RuntimeError):  # what body met is the cause, and a capture that it broke cannot be ended well
            graph.capture_end()
        raise
    graph.capture_end()
    return result
