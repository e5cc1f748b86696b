"""Where workers live and how messages travel. Any Flower app runs on it."""
