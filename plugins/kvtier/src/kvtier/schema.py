"""The JSON Schema of a whole configuration file, for editors: what may be written, not whether it makes sense.

Made from the models that check a configuration. A tier type whose plugin can't be imported is left out, with a reason.
"""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, PydanticUserError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from kvtier.listing import list_plugins
from kvtier_core.errors import PluginError
from kvtier_core.hookspecs import TIER_GROUP
from kvtier_core.plugins import load_tier_type
from kvtier_core.settings.load import TIER_NAME
from kvtier_core.settings.model import PoolSettings, TopSettings
from kvtier_core.units import parse_duration, parse_size

_QUANTITIES: Mapping[object, JsonSchemaValue] = {
    parse_size: {"type": ["string", "integer"], "examples": ["8GiB", "512MB"]},
    parse_duration: {"type": ["string", "number"], "examples": ["30s", "250ms"]},
}


class _Generator(GenerateJsonSchema):
    """Sizes and times as they may be written, not as they are kept."""

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        quantity = _QUANTITIES.get(schema["function"]["function"])
        return super().function_before_schema(schema) if quantity is None else dict(quantity)

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        json_schema = super().model_schema(schema)
        json_schema.pop("description", None)  # the class's docstring is for programmers
        return json_schema


def make_schema(blocked: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """The schema of everything a file may say here, and why which tier types are left out of it.

    *blocked* are normalized names of distributions that count as not installed. Imports every other tier type.
    """
    definitions: dict[str, Any] = {}
    problems: list[str] = []
    types = []
    for entry, status in list_plugins(blocked):
        if entry.group != TIER_GROUP or status != "available":
            continue
        try:
            model = load_tier_type(entry.name, blocked).cls.Settings
            schema = _model_schema(model, f"tier.{entry.name}", definitions)
        except (PluginError, PydanticInvalidForJsonSchema, PydanticUserError) as error:
            problems.append(f"tier type {entry.name!r} is left out: {error}")
            continue
        schema["properties"]["type"]["const"] = entry.name
        definitions[f"tier.{entry.name}"] = schema
        types.append(entry.name)
    top = _model_schema(TopSettings, "top", definitions)
    top["properties"]["pool"] = _model_schema(PoolSettings, "pool", definitions)
    top["properties"]["tiers"] = {
        "type": "object",
        "description": "One table a tier, in the order in which they are asked.",
        "propertyNames": {"pattern": f"^{TIER_NAME.pattern}$"},
        "additionalProperties": {"oneOf": [{"$ref": f"#/$defs/tier.{name}"} for name in types]},
    }
    top["title"] = "kvtier"
    schema = {"$schema": _Generator.schema_dialect, **top}
    return (schema | {"$defs": definitions} if definitions else schema), problems


def _model_schema(model: type[BaseModel], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one table; what it refers to goes into *definitions* under names that no other table has."""
    schema = model.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}", schema_generator=_Generator)
    schema.pop("description", None)  # pydantic before 2.10 adds the class's docstring only now
    for name, inner in schema.pop("$defs", {}).items():
        definitions[f"{prefix}.{name}"] = inner
    return schema
