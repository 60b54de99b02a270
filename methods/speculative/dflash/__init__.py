"""DFlash and DSpark: a network drafts a whole block of tokens in one pass. Start with decoder.py."""
