"""torch.distributed's stores, which its stubs do not export."""

from torch.distributed import FileStore, HashStore, PrefixStore, Store  # type: ignore[attr-defined]

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store"]
