"""The target drafts for itself with some layers skipped. Start with decoder.py."""
