"""Parts of this library and of Flower, mixed."""
