"""C kernels for the CPU, compiled where they run. Without a compiler torch's operators serve."""
