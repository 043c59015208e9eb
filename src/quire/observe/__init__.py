"""What the system says of itself: metrics and events."""
