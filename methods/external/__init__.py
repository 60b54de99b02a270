"""Other implementations behind the same interface; never the baseline."""
