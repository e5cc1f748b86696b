"""What is no test: `features.py` imports a module of its own folder, as scripts do."""

collect_ignore = ["features.py"]
