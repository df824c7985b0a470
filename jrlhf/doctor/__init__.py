"""`jrlhf doctor`: the facts of a machine, and what they mean for runs."""
