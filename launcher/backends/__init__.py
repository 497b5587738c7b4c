"""How the ranks of an attempt come to run: one module for each kind of launcher."""
