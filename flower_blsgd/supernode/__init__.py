"""``blsgd supernode``: Flower's SuperNodes, one per device, started and ended together."""
