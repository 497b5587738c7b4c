"""`dsv41 verify`: does this installation, on this machine, compute what a reference computed?"""
