"""The pack plan: which piece of which document stands where in which pack."""
