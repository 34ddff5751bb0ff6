"""Tools for every module: messages, paths, sizes, and code that runs outside of a pipeline."""
