"""What is no test: `site` is for processes that see emulated cards."""

collect_ignore = ["site"]
