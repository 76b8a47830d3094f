"""Helpers beside the tests (worlds.py, cases.py, processes.py) are imported as tests.core.NAME, by worker processes too."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
