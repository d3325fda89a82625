"""For the whole suite: what run.py sets for a run, set before torch is loaded."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
