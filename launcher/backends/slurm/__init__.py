"""Runs as Slurm jobs: the job's batch step supervises, every attempt is one `srun`."""
