"""`jrlhf doctor`: checks whether this machine is set up for runs."""
