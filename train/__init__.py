"""Training scripts, and the data and configuration that they share."""
