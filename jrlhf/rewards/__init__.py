"""Rewards: functions in worker processes, learned models, and their weighted sum."""
