"""From traced layers to stages: cutting, messages, tied weights, and the optimizer of each stage."""
