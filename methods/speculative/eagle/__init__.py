"""EAGLE 1 to 3: a small network drafts from the hidden states of the target. Start with decoder.py."""
