"""Plans made before a run: what fits, what it costs, which plan is fastest."""
