"""`dsv41 drill`: faults rehearsed on the user's own setup."""
