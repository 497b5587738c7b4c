"""From a command line to a validated, frozen run, to ranks that run it, to one outcome."""
