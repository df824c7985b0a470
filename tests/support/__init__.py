"""Helpers of the tests: nothing here is installed with the package."""
