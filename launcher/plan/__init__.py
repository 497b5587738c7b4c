"""What a run will hold on every rank, told before it starts."""
