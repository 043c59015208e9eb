"""How long a test waits for what must happen. Tests of mutants, which keep it from happening, make it short."""

from __future__ import annotations

SOON_S = 30.0

FOR_EVER_S = 1e6
"""How long something lasts that must not be waited for. A test that waits for it ends by its timeout."""
