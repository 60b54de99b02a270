"""Decoding methods that share one interface. Start with decoder.py, then autoregressive.py."""
