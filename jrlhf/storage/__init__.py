"""Object stores: copies a run's finished files to an address, and fetches models from one."""
