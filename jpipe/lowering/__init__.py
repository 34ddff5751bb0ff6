"""Lowering of a table to integers: operations, rings, channels, and the scalars of every tick."""
