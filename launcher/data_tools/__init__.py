"""`dsv41 data`: what is in a run's data before, and without, training on it."""
