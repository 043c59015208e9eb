"""ClosedObject: a body, or an object in one, whose fields of other names are refused."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from quire.serve.errors import UNKNOWN_FIELD


def _say_closed(schema: dict[str, Any], model: type[ClosedObject]) -> None:
    schema["additionalProperties"] = bool(model.ignored)


class ClosedObject(BaseModel):
    """A body, or an object in one, without fields of other names: they are refused with the nearest that it has."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra=_say_closed)

    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[tuple[object, ...]] = ()  # values with which a field of any name says nothing

    @model_validator(mode="after")
    def _has_no_others(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name not in self.ignored and value not in self.neutral:
                fields = type(self).model_fields
                found = {"name": name, "known": [each.alias or known for known, each in fields.items()]}
                raise PydanticCustomError(UNKNOWN_FIELD, "Input should have no unknown fields", found)
        return self
