"""JSON schemas as grammars: the one place between schemas and the grammar library.

The library reads parts of JSON Schema otherwise than the standard, and numbers only as floating
point. So schemas are read here, and written as rules and regular expressions (ADR 24). What a
grammar holds to is at least what the standard says; what it cannot hold to is refused, or left out
and named. Everything that becomes a schema for an answer goes through ``written``.
"""

from ridgeline.text.json_schema.nodes import SchemaError
from ridgeline.text.json_schema.writing import WHITESPACE, Written, written

ANY_OBJECT = {"type": "object"}

__all__ = ["ANY_OBJECT", "WHITESPACE", "SchemaError", "Written", "written"]
