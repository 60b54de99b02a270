"""Other implementations with the same interface; never the baseline."""
