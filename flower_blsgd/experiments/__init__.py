"""Several runs side by side: which algorithm does best, and can that be claimed."""
