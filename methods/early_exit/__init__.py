"""Let easy tokens skip the upper layers. Start with loop.py, then calm.py."""
