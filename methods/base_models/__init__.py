"""Models trained here, so that methods have something to accelerate."""
