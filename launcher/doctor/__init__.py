"""`dsv41 doctor`: whether this machine, its folders and its services are fit for a run."""
