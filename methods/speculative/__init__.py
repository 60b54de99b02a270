"""Draft tokens cheaply, verify them in one pass of the target. Start with loop.py, then prompt_lookup.py."""
