"""Where ranks that are threads meet before each makes its recording, and when all have."""

from __future__ import annotations

import threading
from typing import Any

from purlin_core.errors import PeerError


class Gate:
    """`with gate:` around a rank's recording; wait() in it, just before it begins. A rank that replayed while another records would wait, on its GPU,
    for one that may wait for that GPU.

    wait() raises PeerError when a rank has failed, or does not come in `timeout` seconds.
    """

    def __init__(self, ranks: int, timeout: float) -> None:
        self._barrier, self._timeout = threading.Barrier(ranks), timeout

    def wait(self) -> None:
        try:
            self._barrier.wait(self._timeout)
        except threading.BrokenBarrierError as error:
            raise PeerError("parallelize: another rank could not record this call, or did not come to it.") from error

    def __enter__(self) -> None:
        """Nothing is to be met yet."""

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            self._barrier.abort()
        else:
            self.wait()
