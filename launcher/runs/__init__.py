"""The commands around runs that exist: runs, status, logs, stop, resume."""
