"""Long-lived streams between a ServerApp and its ClientApps on other machines."""
