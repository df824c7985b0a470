"""Fused operations, one folder each: `reference` is the specification, `api` chooses an implementation."""
