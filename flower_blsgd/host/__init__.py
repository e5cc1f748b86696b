"""A node with several devices: it is a grid of its own, and answers for all of them."""
