"""The laboratory: the paper's tables and figures. Only the command line imports it."""
