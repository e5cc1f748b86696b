"""What a worker does: its local steps, and saying who it is."""
