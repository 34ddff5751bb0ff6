"""What every module may use: messages, paths, sizes, and what runs outside of a pipeline."""
