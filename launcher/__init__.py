"""From a command line to a validated, frozen run, to ranks that run it, to one outcome."""

import os

from launcher.own_packages import claim

# Before torch is loaded, which reads it then. Threads that wait by spinning cost nothing on an idle
# machine; beside one other busy process they make a step up to ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
claim()  # here, so that it precedes any import of `data`, in the loader's processes too
