"""Built-in tasks, written as a user would write a task."""
