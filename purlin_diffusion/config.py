"""What a user asks for. `None` means: choose. The product of the degrees is the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

from purlin_diffusion.errors import ConfigError, NotBuiltError

AttentionMode = Literal["auto", "gather_kv", "ulysses", "ring"]
PatchMode = Literal["exact", "displaced"]
Place = Literal["all", "root"]
Backend = Literal["auto", "purlin", "torch"]
Graph = bool | Literal["auto"]
Overlap = bool | Literal["auto"]

BUILT_ATTENTION = ("gather_kv", "ulysses")
MAX_TIMEOUT = 1_000_000  # eleven days: gloo counts milliseconds in 31 bits
DEGREES = ("cfg", "sequence", "tensor", "patch")


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis; their product is the world."""

    cfg: int = 1
    sequence: int = 1
    tensor: int = 1
    patch: int = 1


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How to spread a denoiser over ranks.

    cfg, sequence, tensor, patch: ranks along each axis; None chooses.
    cfg: 2: where a pipeline puts both halves of guidance into one batch (SD3), each of two ranks computes one, and only the output moves; a call
    whose batch is odd, as skip-layer guidance makes one, is cut by tokens, and so are all with attention processors that may mix rows of a batch.
    1: all calls are, as forward hooks of your own need it that mix rows. None: as 2 where that can be, but as 1 where `sequence` or an `attention`
    was asked for: whoever names one means tokens.
    attention: how sharded tokens meet at an attention. `gather_kv` moves keys and values once; `ulysses` moves tokens to heads and back.
    overlap: `gather_kv` exchanges the keys and values of most heads while the first attend. "auto": where each rank has a GPU of its own, from
    4 MiB a rank on; True: wherever there are two heads. Heads are computed as before. False, for it took longer between two H200 over NVLink: what an
    exchange takes of a GPU, attention lacks.
    patch_mode, warmup_steps: for UNets in patch mode. vae: the VAE's decode, too, is made faster: under a graph.
    graph: CUDA graphs of the denoiser and of the VAE's decode: from the second call of a shape on a recording is replayed. "auto": where that can
    be; True: an error where it cannot. graph_keys: shapes kept at a time, the one used longest ago goes. graph_memory: what all recordings may hold,
    as a share of the GPU's memory that was free before the first.
    text: which ranks hold the text encoders. gather: which ranks get the output.
    backend: who carries the exchanges. timeout: seconds a rank waits for another.

    Raises ConfigError.
    """

    cfg: int | None = None
    sequence: int | None = None
    attention: AttentionMode = "auto"
    overlap: Overlap = False
    tensor: int | None = None
    patch: int | None = None
    patch_mode: PatchMode = "exact"
    warmup_steps: int = 4
    vae: bool = True
    graph: Graph = "auto"
    graph_keys: int = 4
    graph_memory: float = 0.5
    text: Place = "all"
    gather: Place = "all"
    backend: Backend = "auto"
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in DEGREES:
            _check_degree(name, getattr(self, name))
        if (self.cfg or 1) > 2:
            raise _error("cfg", "1, 2 (guidance has two halves) or None", self.cfg, "None chooses.")
        _check_word("attention", self.attention, get_args(AttentionMode))
        _check_word("overlap", self.overlap, (True, False, "auto"))
        _check_word("patch_mode", self.patch_mode, get_args(PatchMode))
        _check_word("text", self.text, get_args(Place))
        _check_word("gather", self.gather, get_args(Place))
        _check_word("backend", self.backend, get_args(Backend))
        _check_word("graph", self.graph, (True, False, "auto"))
        _check_word("vae", self.vae, (True, False))
        if not _is_count(self.warmup_steps, 0):
            raise _error("warmup_steps", "a count of steps, 0 or more", self.warmup_steps, "The default is 4.")
        if not _is_count(self.graph_keys, 1):
            raise _error("graph_keys", "a count of shapes, 1 or more", self.graph_keys, "The default is 4.")
        if not _is_number(self.graph_memory) or not 0 < self.graph_memory <= 1:
            raise _error("graph_memory", "a share, more than 0 and at most 1", self.graph_memory, "The default is 0.5.")
        if not _is_number(self.timeout) or not 0 < self.timeout <= MAX_TIMEOUT:
            raise _error(
                "timeout", f"seconds, more than 0 and at most {MAX_TIMEOUT:,}", self.timeout, "The default is 300."
            )

    def degrees(self, ranks: int) -> Degrees:
        """The degrees for a world of `ranks`. Raises ConfigError when they cannot be, NotBuiltError for axes of a later version."""
        _refuse_unbuilt(self)
        given = prod(getattr(self, name) or 1 for name in DEGREES)
        if self.sequence is None and ranks % given == 0:
            return self._built(ranks // given)
        if given != ranks:
            asked = ", ".join(f"{name}={getattr(self, name)}" for name in DEGREES if getattr(self, name) is not None)
            raise ConfigError(
                f"ParallelConfig: the degrees need a product of {ranks} ranks; got {asked}, which is {given}."
                " Leave `sequence` out to have it chosen, or start as many ranks."
            )
        return self._built(self.sequence or 1)

    def _built(self, sequence: int) -> Degrees:
        if self.cfg == 2 and sequence > 1:
            raise _unbuilt(f"cfg=2 with sequence={sequence}", "cfg=2 on 2 ranks, or `sequence=` alone on any number")
        return Degrees(cfg=self.cfg or 1, sequence=sequence)


def _refuse_unbuilt(config: ParallelConfig) -> None:
    for name in ("tensor", "patch"):
        if (getattr(config, name) or 1) > 1:
            raise _unbuilt(
                f"{name}={getattr(config, name)}", "sequence parallelism: `sequence=`, or leave all degrees out"
            )
    if config.attention == "ring":
        raise _unbuilt('attention="ring"', "attention=" + ", ".join(map(repr, BUILT_ATTENTION)))
    if config.gather == "root":
        raise _unbuilt('gather="root"', 'gather="all"')
    if config.patch_mode == "displaced":
        raise _unbuilt('patch_mode="displaced"', 'patch_mode="exact"')


def _unbuilt(asked: str, there_is: str) -> NotBuiltError:
    return NotBuiltError(f"ParallelConfig: {asked} is not built yet. There is {there_is}.")


def _check_degree(name: str, value: Any) -> None:
    if value is not None and not _is_count(value, 1):
        raise _error(name, "a count of ranks, 1 or more, or None", value, "None chooses.")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_word(name: str, value: Any, words: Sequence[Any]) -> None:
    if not any(value is word or (isinstance(word, str) and value == word) for word in words):
        raise _error(name, "one of " + ", ".join(map(repr, words)), value, "See ParallelConfig.")


def _error(name: str, needed: str, came: Any, cure: str) -> ConfigError:
    return ConfigError(f"ParallelConfig: `{name}` needs {needed}; got {came!r}. {cure}")
