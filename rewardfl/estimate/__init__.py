"""Cost estimate of a run before it starts: FLOPs, memory by phase, disk. For --dry-run and plan_run."""
