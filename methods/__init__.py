"""Decoding methods behind one interface. Start with decoder.py, then autoregressive.py."""
