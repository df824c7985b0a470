"""Fused operations. Each lives in `kernels/<op>/`: `reference` is its specification, `api` picks an implementation."""
