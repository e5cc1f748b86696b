"""An ordinary Flower app on the stream."""
