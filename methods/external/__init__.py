"""Other implementations after the same interface; never the baseline."""
