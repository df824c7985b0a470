"""Object stores: a run's files are copied to an address as they are finished, and models are fetched from one."""
