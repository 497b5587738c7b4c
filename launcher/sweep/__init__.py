"""Many runs that differ in a few settings: started, watched and compared together."""
