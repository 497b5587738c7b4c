"""The batch script of Slurm jobs, and settings for some kinds of sites."""
