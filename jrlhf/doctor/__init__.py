"""`jrlhf doctor`: whether this machine is set up for runs."""
