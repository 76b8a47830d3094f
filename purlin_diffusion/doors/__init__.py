"""The doors into a diffusers model: the only place that touches diffusers' private corners.

- hooks.py: ModelHook and HookRegistry on the root and on modules outside repeated blocks; never inside one, or torch.compile makes a graph a block;
- processors.py: an attention processor stays the object it is and gets a subclass of its own class: diffusers filters keyword arguments by the
  signature of `__call__`, finds processors by isinstance and rebuilds them by `__class__()`, and all of that keeps working;
- funnels.py: below the processor, the entries of diffusers' attention registry, which read a thread's scope, and a TorchFunctionMode for processors
  that call torch's scaled_dot_product_attention.

Everything is installed on instances and taken off again, bit for bit. Anchors are paths: a module or processor that LoRA, an IP-Adapter or a user
replaced is found again at the next root call. No class and no function of diffusers is changed.
"""

from purlin_diffusion.doors.hooks import foreign_hooks, is_hooked, runs_diffusers_parallelism
from purlin_diffusion.doors.installed import ATTRIBUTES, Doors, Wanted
from purlin_diffusion.doors.processors import Site, plain_class

__all__ = [
    "ATTRIBUTES",
    "Doors",
    "Site",
    "Wanted",
    "foreign_hooks",
    "is_hooked",
    "plain_class",
    "runs_diffusers_parallelism",
]
