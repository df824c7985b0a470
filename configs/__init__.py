"""Shipped YAML configurations; `--config NAME` finds them here."""
