"""How often the state is saved, and how many saves stay."""
