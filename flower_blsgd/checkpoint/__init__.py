"""What a run continues from: its whole state, on disk and back."""
