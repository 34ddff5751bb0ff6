"""What the gradient of a parameter is summed in over the microbatches of a minibatch: see `jpipe.gradients.sums`."""
