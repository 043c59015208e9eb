"""Stores for tests: one in memory, and around other stores slow ones, faulty ones, and one that writes down what is
asked of it."""

from quire.testing.stores.dict_store import DictStore
from quire.testing.stores.faulty_store import Fault, FaultyStore
from quire.testing.stores.logged_store import Call, LoggedStore
from quire.testing.stores.slow_store import SlowStore
from quire.testing.stores.wrapped_store import WrappedStore

__all__ = ["Call", "DictStore", "Fault", "FaultyStore", "LoggedStore", "SlowStore", "WrappedStore"]
