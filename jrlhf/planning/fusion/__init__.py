"""What RLHFuse fuses: two models that train in pipelines of opposite directions, and scores with the last rows."""
