"""The model over several ranks: who holds which part, and how tokens and rows travel."""
