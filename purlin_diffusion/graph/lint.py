"""What in a forward would forbid a CUDA graph of it, found on the CPU: where the host waits for the device, and where it copies to it.

On the CPU nothing waits and nothing is copied, so what is asked for is looked at: operators whose result the host must read (below the dispatcher)
and calls that read a tensor, move it to the CPU, or make one there (as Python makes them).
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Kind = Literal["host sync", "host copy"]

SYNCS = frozenset(
    (
        *("_local_scalar_dense", "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
        *("masked_select", "equal", "is_nonzero", "repeat_interleave.Tensor"),
    )
)
MASKED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))  # with a mask they count its ones first
FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)
FACTORIES = (
    *(torch.arange, torch.linspace, torch.zeros, torch.ones, torch.empty, torch.full, torch.eye),
    *(torch.rand, torch.randn, torch.randint, torch.tril_indices, torch.triu_indices),
)
READS: Mapping[Any, str] = {Tensor.cpu: ".cpu()", Tensor.numpy: ".numpy()", Tensor.tolist: ".tolist()"}


@dataclass(frozen=True)
class Finding:
    """One place in a model's code: what it asks for, the module that was running, and where it stands."""

    kind: Kind
    what: str
    module: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """`file:line  code`, the file from its package on."""
        parts = Path(self.file).parts
        start = next((i for i, part in enumerate(parts) if part == "site-packages"), len(parts) - 3) + 1
        code = linecache.getline(self.file, self.line).strip()
        return f"{Path(*parts[max(start, 0) :])}:{self.line}  {code}"


@dataclass
class Watch:
    """Gathers findings while its modes are entered. `modules`: those that are running, the innermost last."""

    found: dict[Finding, int] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)

    def note(self, kind: Kind, what: str) -> None:
        file, line = _place()
        finding = Finding(kind, what, self.modules[-1] if self.modules else "", file, line)
        self.found[finding] = self.found.get(finding, 0) + 1


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        base = name.partition(".")[0]
        if base in SYNCS or name in SYNCS:
            self.watch.note("host sync", base)
        elif base in MASKED and any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            self.watch.note("host sync", f"{base} with a mask")
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            self.watch.note("host sync", READS[func])
        elif func is Tensor.to and _is_cpu(kwargs.get("device", args[1] if len(args) > 1 else None)):
            self.watch.note("host sync", '.to("cpu")')
        elif func in FROM_HOST:
            self.watch.note("host copy", f"torch.{func.__name__}: made from values of the host")
        elif func in FACTORIES and kwargs.get("device") is None:
            self.watch.note("host copy", f"torch.{func.__name__} without device=: made on the host")
        return func(*args, **kwargs)


def _is_cpu(given: Any) -> bool:
    """Whether a device was named in the code: one that is read off another tensor would be that tensor's."""
    return isinstance(given, str) and given == "cpu"


@contextmanager
def watching(model: nn.Module, watch: Watch) -> Iterator[None]:
    """Gather into `watch` what runs inside; modules of `model` are told by path."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            path = f"{type(model).__name__}.{name}" if name else type(model).__name__
            stack.enter_context(_told(module, path, watch))
        stack.enter_context(_Calls(watch))
        stack.enter_context(_Operators(watch))
        yield


@contextmanager
def _told(module: nn.Module, path: str, watch: Watch) -> Iterator[None]:
    before = module.register_forward_pre_hook(lambda *_: watch.modules.append(path))
    after = module.register_forward_hook(lambda *_: _drop(watch.modules), always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _drop(modules: list[str]) -> None:
    modules.pop()


def _place() -> tuple[str, int]:
    """The innermost frame that is neither torch's nor this file's."""
    torch_home, frame = str(Path(torch.__file__).parent), sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(torch_home) or _ours(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _ours(file: str) -> bool:
    return file == __file__ or file.startswith("<")


def lint(model: nn.Module, call: Callable[[], Any]) -> dict[Finding, int]:
    """What `call`, which runs `model` or a method of it, does that a graph forbids, and how often."""
    watch = Watch()
    with torch.no_grad(), watching(model, watch):
        call()
    return watch.found
