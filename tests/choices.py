"""Choices that hypothesis makes, which finds the shortest failing sequence."""

from __future__ import annotations

from hypothesis import strategies as st

from quire.testing.choices import Choices


def drawn(data: st.DataObject) -> Choices:
    """From `st.data()`."""
    return Choices(lambda n: data.draw(st.integers(0, n - 1)))
