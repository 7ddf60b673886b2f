"""Calls of the user's module: arguments, state, hooks, and runs that repeat."""
