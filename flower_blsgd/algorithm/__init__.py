"""The mathematics of biased local SGD: no Flower, no process, no clock."""
