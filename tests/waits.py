"""How long a test waits for what must happen. Tests of mutants, which keep it from happening, make it short."""

from __future__ import annotations

SOON_S = 30.0
