"""What every decoder must satisfy, as functions."""
