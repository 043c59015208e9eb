"""Contracts: what every implementation of a port must do, as classes of tests to subclass. They need pytest."""

import pytest

pytest.register_assert_rewrite("quire.testing.contracts.store", "quire.testing.contracts.store_model")
