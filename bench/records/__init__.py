"""What a run writes: its folder, and trackers that follow it."""
