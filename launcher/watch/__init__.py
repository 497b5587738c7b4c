"""Looking at the ranks of an attempt from outside: who hangs, and who is slow."""
