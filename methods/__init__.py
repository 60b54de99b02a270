"""Decoding methods after one interface. Start with decoder.py, then autoregressive.py."""
