"""What stands around the loop."""
