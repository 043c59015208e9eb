"""Contracts: test classes for implementations of a port, to subclass. They need pytest."""

import pytest

pytest.register_assert_rewrite("quire.testing.contracts.store", "quire.testing.contracts.store_model")
