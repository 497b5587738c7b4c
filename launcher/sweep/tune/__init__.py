"""sweep.scheduler=asha: the points of a sweep as trials of Ray Tune."""
