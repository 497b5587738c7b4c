"""How `dsv41-train -m` runs its points."""
