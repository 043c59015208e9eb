"""A setting that is a JSON object, as text or as a mapping."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.errors import InvalidInput


def json_object(given: str | Mapping[str, Any], what: str, *, fix: str) -> Mapping[str, Any]:
    """The object in `given`. Raises InvalidInput, which names `what` and says `fix`, if there is none."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{what} is not JSON: {error}.", fix=fix) from error
    if not isinstance(given, Mapping):
        raise InvalidInput(f"{what} is an object, and this is a {type(given).__name__}.", fix=fix)
    return given
