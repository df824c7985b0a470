"""Fused operations, one folder per operation: `reference` is the specification, `api` chooses an implementation."""
