"""Sums of the gradient of a parameter over the microbatches of a minibatch: see `jpipe.gradients.sums`."""
