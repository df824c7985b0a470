"""Configuration: schema, parsing, checks."""
