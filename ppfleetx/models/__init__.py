"""Models: what they compute, for one device; `spec.py` files need no Paddle."""
