"""JSON schemas as GBNF grammars: what a grammar allows is JSON, and follows the schema wherever one can say it."""

from llamamg.json_schema.convert import SchemaError, schema_expression, schema_to_grammar

__all__ = ["SchemaError", "schema_expression", "schema_to_grammar"]
