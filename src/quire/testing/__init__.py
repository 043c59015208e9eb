"""For tests of code that uses Quire: a content oracle, a model without a device, a small plan."""

from quire.testing.content import ContentOracle
from quire.testing.fake_model import FakeModel, FakeStep, next_token
from quire.testing.plans import small_plan

__all__ = ["ContentOracle", "FakeModel", "FakeStep", "next_token", "small_plan"]
