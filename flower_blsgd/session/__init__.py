"""A worker inside the user's own training script, which ``blsgd launch`` starts."""
