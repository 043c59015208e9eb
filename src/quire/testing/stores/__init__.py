"""Stores for tests: one in a dictionary, and slow and faulty ones around any other."""

from quire.testing.stores.dict_store import DictStore
from quire.testing.stores.wrapped_store import Fault, FaultyStore, SlowStore, WrappedStore

__all__ = ["DictStore", "Fault", "FaultyStore", "SlowStore", "WrappedStore"]
