"""P-EAGLE: EAGLE-3 that drafts all its tokens in one pass. Start with decoder.py."""
