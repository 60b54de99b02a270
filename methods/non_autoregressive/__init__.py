"""Write all tokens at once. Start with loop.py, then nat.py."""
