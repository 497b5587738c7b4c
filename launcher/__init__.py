"""From a command line to a validated, frozen run, to ranks that run it, to one outcome."""

from launcher.own_packages import claim

claim()  # here, so that it precedes any import of `data`, in the loader's processes too
