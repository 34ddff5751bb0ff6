"""The arguments of a pipeline: their checks, and the facts that follow from them."""
