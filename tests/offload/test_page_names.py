"""What is remembered of names is bounded, however many namespaces there are."""

from __future__ import annotations

from quire.offload.page_names import PageNames
from quire.spec.events import Namespace


def test_scopes_of_many_salts_are_not_kept_for_ever() -> None:
    names = PageNames(4, 4, b"identity")
    first = names.scope(Namespace(salt="0"))
    others = {names.scope(Namespace(salt=str(number))) for number in range(1, 5_000)}
    assert len(others) == 4_999 and first not in others
    assert len(names._scopes) <= 1_024
    assert names.scope(Namespace(salt="0")) == first
