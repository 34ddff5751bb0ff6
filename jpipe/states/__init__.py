"""Training states in other forms: portable between pipelines, and read and written by name."""
