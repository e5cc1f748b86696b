"""What a run shows while it goes on, and the folder that it leaves."""
