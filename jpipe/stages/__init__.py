"""The way from traced layers to stages: cutting, messages, tied weights, optimizer."""
