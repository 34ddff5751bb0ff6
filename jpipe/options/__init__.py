"""The arguments of a pipeline: their checks, and what follows from them."""
