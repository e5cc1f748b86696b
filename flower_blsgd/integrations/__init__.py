"""Training scripts of other libraries under ``blsgd launch``."""
