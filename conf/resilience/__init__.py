"""When a run that ended is started again."""
